"""Ahead-of-time compilation of the Hopper kernels for an H200, on a machine without a GPU."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from deltanet_jax.core.recurrence import Problem
from deltanet_jax.kernels import mosaic_gpu
from deltanet_jax.kernels.mosaic_gpu import support

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="needs the packages jax-cuda13-plugin and jax-cuda13-pjrt",
    ),
    pytest.mark.skipif(
        jax.__version_info__ < support.OLDEST_JAX,
        reason=f"the kernels need jax 0.11.2; this is {jax.__version__}",
    ),
]

# Public figures of an H200, in the form that the compiler reads.
H200 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


# Most bytes that a thread stores for want of registers, on jax 0.12.0.1; others none.
KNOWN_SPILLS = {
    (64, "kda"): {"channel_gradients": 40},
    (128, "kda"): {"decayed_chunks": 8, "channel_gradients": 40},
}
KERNELS = {"run_states", "reverse_states", "chunk_gradients"}
DELTA_KERNELS, GATE_KERNELS = {"chunk_inverses"}, {"gate_vectors", "gate_gradient"}
CHANNEL_KERNELS = {
    "decayed_chunks", "run_states", "reverse_states", "chunk_cotangents", "channel_gradients",
}  # fmt: skip
# Heads to each of which a program belongs, and those that share programs or multiprocessors.
SMALL, MANY_SMALL = (1, 128, 2, 64, 64), (16, 2048, 32, 64, 64)
MIDDLE, MANY = (2, 256, 32, 128, 128), (8, 4096, 16, 128, 128)
WIDE, WIDE_VALUES, WIDE_KEYS = (4, 8192, 8, 256, 256), (2, 512, 8, 128, 256), (2, 640, 8, 256, 64)


def longer(sizes, rounds: int):
    """Other numbers of chunks for every case: what has been compiled is not compiled again."""
    B, T, *heads = sizes
    return B, rounds * T, *heads


def spills(sizes, kind, capfd, *, backward: bool, dtype=jnp.bfloat16) -> dict[str, int]:
    """Bytes that a thread of each kernel stores for want of registers, by the compiler's log."""
    B, T, H, K, V = sizes
    topology = topologies.get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1")
    device = topology.devices[0]
    sharding = SingleDeviceSharding(device)

    def shape(*axes, dtype=dtype):
        return jax.ShapeDtypeStruct(axes, dtype, sharding=sharding)

    keys, values = shape(B, T, H, K), shape(B, T, H, V)
    vector = shape(B, T, H, dtype=jnp.float32)
    state = shape(B, H, K, V, dtype=jnp.float32)
    arrays = {"q": keys, "k": keys, "v": values, "initial_state": state}
    if kind in ("delta", "gated-delta", "kda"):
        arrays["beta"] = vector
    if kind in ("gated-delta", "gated"):
        arrays["g"] = vector
    elif kind == "kda":
        arrays["g"] = shape(B, T, H, K, dtype=jnp.float32)

    def run(arrays):
        missing = {"reset": None, "scale": K**-0.5, "precision": None}
        return mosaic_gpu.chunkwise(Problem(**({"g": None, "beta": None} | arrays | missing)))

    def both(arrays, cotangents):
        outputs, pull = jax.vjp(run, arrays)
        return outputs, pull(cotangents)

    program, arguments = (both, (arrays, (values, state))) if backward else (run, (arrays,))
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        lowered = jax.jit(program).trace(*arguments).lower()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        lowered.compile()
    log = capfd.readouterr().out
    found = re.findall(
        r"properties for (\w+?)_mosaic_gpu.*?(\d+) bytes spill stores", log, re.DOTALL
    )
    return {name: int(stores) for name, stores in found}


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        *(
            (sizes, kind)
            for sizes in (SMALL, MANY_SMALL, MIDDLE, MANY, WIDE)
            for kind in ("delta", "gated-delta")
        ),
        (WIDE_VALUES, "gated-delta"),
        (WIDE_KEYS, "gated-delta"),
        (MANY, "linear"),
        (longer(MANY_SMALL, 2), "gated"),
        (SMALL, "kda"),
        (MANY, "kda"),
    ],
    ids=str,
)
def test_forward_and_backward_compile_for_an_h200(sizes, kind, capfd):
    found = spills(sizes, kind, capfd, backward=True)
    wanted = CHANNEL_KERNELS if kind == "kda" else KERNELS
    if "delta" in kind:
        wanted = wanted | DELTA_KERNELS
    if "gated" in kind:
        wanted = wanted | GATE_KERNELS
    assert set(found) == wanted
    known = KNOWN_SPILLS.get((sizes[3], kind), {})
    for name, stores in found.items():
        assert stores <= known.get(name, 0), f"{name} spills more than is known"


@pytest.mark.parametrize("sizes", [longer(MANY_SMALL, 3), longer(WIDE, 3)], ids=str)
def test_float16_compiles_for_an_h200(sizes, capfd):
    """The inverse's products are in bfloat16; its gradients have a tile of the weighed keys."""
    found = spills(sizes, "gated-delta", capfd, backward=True, dtype=jnp.float16)
    assert set(found) == KERNELS | DELTA_KERNELS | GATE_KERNELS
    assert set(found.values()) == {0}


@pytest.mark.parametrize("sizes", [longer(MANY, 4), longer(MANY_SMALL, 4)], ids=str)
@pytest.mark.parametrize("kind", ["delta", "gated-delta"])
def test_the_forward_with_its_inverses_compiles_for_an_h200(sizes, kind, capfd):
    """Where heads fill the multiprocessors."""
    found = spills(sizes, kind, capfd, backward=False)
    assert set(found) == {"run_states"} | ({"gate_vectors"} if kind == "gated-delta" else set())
    assert set(found.values()) == {0}
