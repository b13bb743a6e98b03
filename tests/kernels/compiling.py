"""Compile calls of the Hopper kernels ahead of time, on a machine without a GPU."""

import importlib.util
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding
from jaxlib.mlir import ir

from deltanet_jax import step
from deltanet_jax.core.problem import Problem, Tokens
from deltanet_jax.kernels import mosaic_gpu
from deltanet_jax.kernels.mosaic_gpu import support

__all__ = [
    "CALLS",
    "MANY",
    "NEEDED",
    "OTHER_SMS",
    "SMS",
    "STEPS",
    "Call",
    "Step",
    "lower",
    "shared_memory",
    "target",
]

NEEDED = [
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
H200 = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: {sms}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA H200"
"""
SMS = 132  # of an H200
OTHER_SMS = (114, 78)  # of an H100 PCIe, and of a slice of a GPU


class Call(NamedTuple):
    """A call of the chunkwise kernels; `sizes` are B, T, H, K and V."""

    sizes: tuple[int, int, int, int, int]
    kind: str
    backward: bool = True
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        return "-".join((self.kind, *map(str, self.sizes), direction, self.dtype))


class Step(NamedTuple):
    """A call of the decoding kernel; `sizes` are B, H and K."""

    sizes: tuple[int, int, int]
    kind: str

    def __str__(self) -> str:
        return "-".join(("step", self.kind, *map(str, self.sizes)))


# Heads that have a thread block each, and heads that share thread blocks or SMs.
SMALL, MANY_SMALL = (1, 128, 2, 64, 64), (16, 2048, 32, 64, 64)
MIDDLE, MANY = (2, 256, 32, 128, 128), (8, 4096, 16, 128, 128)
WIDE, WIDE_VALUES, WIDE_KEYS = (4, 8192, 8, 256, 256), (2, 512, 8, 128, 256), (2, 640, 8, 256, 64)


def longer(sizes, times: int):
    """Other numbers of chunks for every case: what has been compiled is not compiled again."""
    B, T, *heads = sizes
    return B, times * T, *heads


DELTA = ("delta", "gated-delta")
CALLS = [
    *(Call(x, kind) for x in (SMALL, MANY_SMALL, MIDDLE, MANY, WIDE) for kind in DELTA),
    Call(WIDE_VALUES, "gated-delta"),
    Call(WIDE_KEYS, "gated-delta"),
    Call(MANY, "linear"),
    Call(longer(MANY_SMALL, 2), "gated"),
    Call(SMALL, "kda"),
    Call(MANY, "kda"),
    # The inverse's products are in bfloat16; its gradients have a tile of the weighed keys.
    Call(longer(MANY_SMALL, 3), "gated-delta", dtype="float16"),
    Call(longer(WIDE, 3), "gated-delta", dtype="float16"),
    # Heads fill the SMs: the forward is one kernel with its inverses.
    *(Call(longer(x, 4), kind, backward=False) for x in (MANY, MANY_SMALL) for kind in DELTA),
]
STEPS = [
    Step(sizes, kind)
    for sizes in ((1, 16, 128), (256, 16, 128), (64, 8, 256))
    for kind in ("delta", "gated-delta", "kda")
]


def target(sms: int = SMS):
    """A device of one Hopper GPU with that many SMs, for the compiler."""
    config = H200.format(sms=sms)
    topology = topologies.get_topology_desc("h200", "cuda", target_config=config, topology="1x1x1")
    return topology.devices[0]


def lower(call: Call | Step, sms: int = SMS) -> jax.stages.Lowered:
    """Trace and lower a call for a GPU with that many SMs."""
    device = target(sms)
    program, arguments, donated = (_step if isinstance(call, Step) else _chunkwise)(call, device)
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=sms, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        return jax.jit(program, donate_argnums=donated).trace(*arguments).lower()


def shared_memory(lowered: jax.stages.Lowered) -> dict[str, int]:
    """Return the bytes of shared memory that each kernel of a call is launched with, by name."""
    module, sizes = lowered.compiler_ir("stablehlo"), {}
    module.context.allow_unregistered_dialects = True

    def visit(op) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and "mosaic" in str(
            op.attributes["call_target_name"]
        ):
            kernel = op.attributes["mhlo.backend_config"]["module"].value_bytes
            ir.Module.parse(kernel, module.context).operation.walk(visit)
        elif op.name.endswith("gpu.launch"):
            name = op.parent.attributes["sym_name"].value.removesuffix("_mosaic_gpu")
            *_, size = op.operands
            sizes[name] = int(re.match(r"\d+", str(size.owner.attributes["value"]))[0])
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return sizes


def _shapes(device, default):
    def shape(*axes, dtype=default):
        return jax.ShapeDtypeStruct(axes, dtype, sharding=SingleDeviceSharding(device))

    return shape


def _chunkwise(call: Call, device):
    B, T, H, K, V = call.sizes
    shape = _shapes(device, jnp.dtype(call.dtype))
    keys, values = shape(B, T, H, K), shape(B, T, H, V)
    vector = shape(B, T, H, dtype=jnp.float32)
    state = shape(B, H, K, V, dtype=jnp.float32)
    arrays = {"q": keys, "k": keys, "v": values}
    if call.kind in ("delta", "gated-delta", "kda"):
        arrays["beta"] = vector
    if call.kind in ("gated-delta", "gated"):
        arrays["g"] = vector
    elif call.kind == "kda":
        arrays["g"] = shape(B, T, H, K, dtype=jnp.float32)

    def forward(tokens, state):
        return mosaic_gpu.chunkwise(Problem(tokens, state, scale=K**-0.5))

    def both(tokens, state, cotangents):
        outputs, pull = jax.vjp(forward, tokens, state)
        return outputs, pull(cotangents)

    inputs = Tokens(**arrays), state
    return (both, (*inputs, (values, state)), ()) if call.backward else (forward, inputs, ())


def _step(call: Step, device):
    B, H, K = call.sizes
    shape = _shapes(device, jnp.float32)
    keys, vector = shape(B, H, K, dtype=jnp.bfloat16), shape(B, H)
    gate = {"delta": None, "gated-delta": vector, "kda": shape(B, H, K)}[call.kind]

    def run(q, k, v, state, g, beta):
        return step(q, k, v, state, g=g, beta=beta)

    return run, (keys, keys, keys, shape(B, H, K, K), gate, vector), 3
