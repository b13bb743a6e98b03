"""The TPU kernels through the real compiler, for chips that this machine does not have.

The interpreters know nothing of tiles, of what Mosaic can lower, or of how large VMEM is; libtpu
compiles for a described topology without opening a device. Skipped without libtpu.
"""

import importlib.util
import os
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from deltanet_jax.core.problem import Problem, Tokens
from deltanet_jax.kernels import mosaic_tpu
from deltanet_jax.kernels.mosaic_tpu import plan
from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from deltanet_jax.models.training import make_optimizer, train_step

# Read by libtpu when it loads: test processes side by side, no logs, no search for a device.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_LOG_DIR", "disabled")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make test-tpu-compile"
)

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
VMEM_MIB = {"v5e": 128, "v5p": 64, "v6e": 128, "tpu7x": 64}  # of one core


def devices(chip: str) -> list:
    jax.devices()  # so that this process's own backend has read XLA_FLAGS:
    # libtpu reads them too when it loads, and aborts on one that it does not know.
    with mock.patch.dict(os.environ, XLA_FLAGS=""):
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return topology.devices


def arguments(
    sharding, shape, dtype=jnp.bfloat16, *, gate: str = "none", delta: bool = True
) -> dict:
    B, T, H, HV, K, V = shape

    def array(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arrays = {"q": array((B, T, H, K), dtype), "k": array((B, T, H, K), dtype)}
    arrays["v"] = array((B, T, HV, V), dtype)
    if delta:
        arrays["beta"] = array((B, T, HV), jnp.float32)
    if gate != "none":
        arrays["g"] = array((B, T, HV, K) if gate == "vector" else (B, T, HV), jnp.float32)
    return arrays


def forward(arrays: dict) -> tuple[jax.Array, jax.Array]:
    p = Problem(Tokens(**arrays), scale=arrays["k"].shape[-1] ** -0.5)
    assert mosaic_tpu.why_not(p, None) is None
    return mosaic_tpu.chunkwise(p)


def forward_and_backward(arrays: dict) -> tuple:
    outputs, vjp = jax.vjp(forward, arrays)
    return outputs, vjp(outputs)


def vmem_of_kernels(text: str) -> dict[str, int]:
    """Bytes of VMEM that the compiler gave to each of the package's kernels."""
    found = {}
    for line in text.splitlines():
        name = re.search(r"%[\w.]*deltanet_(forward|backward)[\w.]* = .*custom-call\(", line)
        if name:
            used = line[line.index('"used_scoped_memory_configs"') :]
            found[name.group(1)] = int(
                re.search(r'"memory_space":"1".*?"size":"(\d+)"', used).group(1)
            )
    return found


def compiled_text(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_forward_and_training_compile(chip: str, D: int) -> None:
    H = 8 if D == 128 else 2  # the largest cells but at 64, where two heads compile faster
    arrays = arguments(
        SingleDeviceSharding(devices(chip)[0]),
        (1, 300, H, H, D, D),
        gate="scalar" if chip in ("v5p", "v6e") else "none",
    )
    inference = vmem_of_kernels(compiled_text(forward, arrays))
    training = vmem_of_kernels(compiled_text(forward_and_backward, arrays))
    assert set(inference) == {"forward"}
    assert set(training) == {"forward", "backward"}
    for used in (*inference.values(), *training.values()):
        assert 0 < used <= plan.VMEM_LIMIT < VMEM_MIB[chip] * 2**20


@pytest.mark.parametrize(
    ("chip", "D", "heads"),
    [
        ("v5e", 128, plan.MAX_HEADS_VECTOR_GATE),
        ("v5e", 64, 1),
        ("v5p", 128, 1),
        ("v5p", 256, 1),
        ("v6e", 128, 1),
        ("v6e", 64, 1),
        ("tpu7x", 128, 1),
        ("tpu7x", 256, 1),
    ],
)
def test_a_gate_per_channel_compiles(chip: str, D: int, heads: int) -> None:
    """The largest cells once; they take most of the time."""
    one = SingleDeviceSharding(devices(chip)[0])
    arrays = arguments(one, (1, 300, heads, heads, D, D), gate="vector")
    used = vmem_of_kernels(compiled_text(forward_and_backward, arrays))
    assert set(used) == {"forward", "backward"}
    assert min(used.values()) > 0
    assert max(used.values()) <= plan.VMEM_LIMIT


@pytest.mark.parametrize(
    ("shape", "dtype", "gate", "delta"),
    [
        ((1, 256, 2, 2, 128, 128), jnp.float32, "scalar", True),
        ((1, 256, 2, 8, 64, 256), jnp.bfloat16, "scalar", True),
        ((2, 40, 1, 12, 256, 64), jnp.bfloat16, "none", True),
        ((1, 256, 8, 8, 128, 128), jnp.bfloat16, "scalar", False),
        ((1, 256, 1, 2, 64, 128), jnp.float32, "vector", True),
        ((1, 40, 1, 6, 128, 64), jnp.bfloat16, "vector", False),
    ],
    ids=[
        "float32",
        "K64-V256-grouped",
        "K256-V64-short-heads-over-cells",
        "no-delta-rule",
        "kda-float32-grouped",
        "gla-short-heads-over-cells",
    ],
)
def test_other_kinds_of_problem_compile(shape, dtype, gate: str, delta: bool) -> None:
    arrays = arguments(
        SingleDeviceSharding(devices("v5e")[0]), shape, dtype, gate=gate, delta=delta
    )
    assert "deltanet_backward" in compiled_text(forward_and_backward, arrays)


def test_shards_of_batch_and_heads_compile() -> None:
    mesh = Mesh(np.array(devices("v6e")).reshape(2, 2), ("data", "model"))
    tokens, state = PartitionSpec("data", None, "model"), PartitionSpec("data", "model")
    arrays = arguments(NamedSharding(mesh, tokens), (2, 256, 4, 4, 128, 128))
    sharded = jax.shard_map(
        forward, mesh=mesh, in_specs=(dict.fromkeys(arrays, tokens),), out_specs=(tokens, state)
    )

    def training(arrays: dict) -> tuple:
        outputs, vjp = jax.vjp(sharded, arrays)
        return outputs, vjp(outputs)

    text = compiled_text(training, arrays)
    assert "deltanet_backward" in text
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text


def test_training_step_of_a_sharded_language_model_compiles() -> None:
    """A user's `jit`: no `shard_map`, nothing named but the shardings of parameters and batch."""
    config = DeltaNetConfig(
        vocab_size=256, hidden_size=256, num_layers=1, num_heads=2, dtype="bfloat16"
    )
    mesh = Mesh(np.array(devices("v6e")).reshape(2, 2), ("data", "model"))
    rules = (("embed", None), ("heads", "model"), ("mlp", "model"), ("vocab", "model"))

    def make() -> tuple[DeltaNetLM, nnx.Optimizer]:
        model = DeltaNetLM(config, rngs=nnx.Rngs(0))
        return model, make_optimizer(model, 1e-3, total_steps=10)

    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        graph, state = nnx.split(nnx.eval_shape(make))
        shardings = nnx.get_named_sharding(state, mesh)
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
        )
        data = NamedSharding(mesh, PartitionSpec("data"))
        tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=data)

        def step(state: nnx.State, tokens: jax.Array) -> tuple:
            model, optimizer = nnx.merge(graph, state)
            metrics = train_step(model, optimizer, tokens)
            return nnx.state((model, optimizer)), metrics

        text = compiled_text(step, state, tokens)
    # Each device runs the kernels on its row and its head, in two chunks; nothing is gathered.
    for name in ("deltanet_forward", "deltanet_backward"):
        assert re.search(rf"{name}[.\d]* = \(bf16\[1,2,1,128,128\]", text)
    assert "all-gather" not in text
    assert "all-to-all" not in text
