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


# Most bytes that a thread stores for want of registers, on jax 0.11.2 and 0.12.0.1; others none.
# They differ by 8 from one compilation of the same kernel to the next, for which there is room:
# 104, 12, 64, 20, 40 and 8 were seen of those with a gate at K = 64, of K = 256, and of channels.
KNOWN_SPILLS = {
    (64, "delta"): {"run_states": 56},
    (64, "gated-delta"): {"run_states": 112},
    (256, "delta"): {"chunk_gradients": 20},
    (256, "gated-delta"): {"run_states": 28, "chunk_gradients": 72},
    (64, "kda"): {"run_states": 44, "channel_gradients": 48},
    (128, "kda"): {"decayed_chunks": 16, "channel_gradients": 48},
}
KERNELS = ("chunk_inverses", "run_states", "reverse_states", "chunk_gradients")
CHANNEL_KERNELS = (
    "decayed_chunks", "run_states", "reverse_states", "chunk_cotangents", "channel_gradients",
)  # fmt: skip
# Of different numbers of chunks and heads: what has been compiled is not compiled again.
SMALL, MIDDLE, WIDE = (1, 128, 2, 64, 64), (2, 256, 32, 128, 128), (1, 192, 2, 256, 256)
MANY_SMALL = (16, 2048, 32, 64, 64)
MANY = (8, 4096, 16, 128, 128)  # chunks: every warpgroup of `decayed_chunks` walks over several


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
    arrays = {"q": keys, "k": keys, "v": values, "beta": vector, "initial_state": state}
    if kind == "gated-delta":
        arrays["g"] = vector
    elif kind == "kda":
        arrays["g"] = shape(B, T, H, K, dtype=jnp.float32)

    def run(arrays):
        missing = {"reset": None, "scale": K**-0.5, "precision": None}
        return mosaic_gpu.chunkwise(Problem(**({"g": None} | arrays | missing)))

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
        *((sizes, kind) for sizes in (SMALL, MIDDLE, WIDE) for kind in ("delta", "gated-delta")),
        (SMALL, "kda"),
        (MANY, "kda"),
    ],
    ids=str,
)
def test_forward_and_backward_compile_for_an_h200(sizes, kind, capfd):
    found = spills(sizes, kind, capfd, backward=True)
    kernels = set(CHANNEL_KERNELS if kind == "kda" else KERNELS)
    assert set(found) == kernels | (
        {"gate_vectors", "gate_gradient"} if kind == "gated-delta" else set()
    )
    known = KNOWN_SPILLS.get((sizes[3], kind), {})
    for name, stores in found.items():
        assert stores <= known.get(name, 0), f"{name} spills more than is known"


def test_the_inverse_in_float16_compiles_for_an_h200(capfd):
    """Its products are in bfloat16, so that tiles of two types are in use."""
    found = spills(SMALL, "delta", capfd, backward=False, dtype=jnp.float16)
    assert found["chunk_inverses"] == 0


@pytest.mark.parametrize("sizes", [MANY, MANY_SMALL], ids=str)
@pytest.mark.parametrize("kind", ["delta", "gated-delta"])
def test_the_forward_with_its_inverses_compiles_for_an_h200(sizes, kind, capfd):
    """Where heads fill the multiprocessors; 4 or 44 bytes at K = 128 with a gate, others none."""
    found = spills(sizes, kind, capfd, backward=False)
    assert set(found) == {"run_states"} | ({"gate_vectors"} if kind == "gated-delta" else set())
    assert found.pop("gate_vectors", 0) == 0
    assert found["run_states"] <= (64 if kind == "gated-delta" else 12)
