"""Ahead-of-time compilation of a decoding step for an H200, on a machine without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from deltanet_jax import step
from tests.kernels import test_mosaic_gpu_compile as forward_and_backward

pytestmark = forward_and_backward.pytestmark


@pytest.mark.parametrize("kind", ["delta", "gated-delta", "kda"])
@pytest.mark.parametrize("sizes", [(1, 16, 128), (256, 16, 128), (64, 8, 256)], ids=str)
def test_a_donated_state_is_overwritten_by_one_kernel(sizes, kind, monkeypatch, capfd):
    """Nothing but the kernel touches the state, and its registers suffice."""
    B, H, K = sizes
    topology = topologies.get_topology_desc(
        "h200", "cuda", target_config=forward_and_backward.H200, topology="1x1x1"
    )
    device = topology.devices[0]

    def shape(*axes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(axes, dtype, sharding=SingleDeviceSharding(device))

    keys, vector = shape(B, H, K, dtype=jnp.bfloat16), shape(B, H)
    gate = {"delta": None, "gated-delta": vector, "kda": shape(B, H, K)}[kind]
    arguments = (keys, keys, keys, shape(B, H, K, K), gate, vector)

    def run(q, k, v, state, g, beta):
        return step(q, k, v, state, g=g, beta=beta)

    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        lowered = jax.jit(run, donate_argnums=3).trace(*arguments).lower()
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    program = lowered.compile().as_text()
    log = capfd.readouterr().out
    stores = re.search(r"properties for decode.*?(\d+) bytes spill stores", log, re.DOTALL)
    assert stores
    assert int(stores.group(1)) == 0
    state = rf"f32\[{B},{H},{K},{K}\]"
    users = re.findall(rf"= .*{state}.* ([\w-]+)\(", program.split("ENTRY")[1])
    assert sorted(set(users) - {"parameter", "get-tuple-element", "tuple"}) == ["custom-call"]
