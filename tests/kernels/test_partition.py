"""Kernels over the devices of a mesh: what is split, and that nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deltanet_jax.core.problem import Problem
from deltanet_jax.kernels.partition import over_devices
from deltanet_jax.ops import dispatch
from tests.kernels.tpu_problems import expected, problem, values_and_gradients
from tests.tolerances import TOLERANCES, assert_close, relative_rms

TOKENS, STATE = P("data", None, "model"), P("data", "model")
BOTH = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def mesh_of(kind: AxisType, shape: tuple[int, ...] = (2, 2)) -> jax.sharding.Mesh:
    if jax.device_count() < 4:
        pytest.skip("needs four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def placed(p: Problem, mesh: jax.sharding.Mesh, tokens: P, state: P) -> Problem:
    def place(x: jax.Array | None, spec: P) -> jax.Array | None:
        return None if x is None else jax.device_put(x, NamedSharding(mesh, spec))

    split = p.map_tokens(lambda x: place(x, tokens))
    reset = place(p.reset, P(*tokens[:1]))
    return dataclasses.replace(split, initial_state=place(p.initial_state, state), reset=reset)


def run_and_record(shapes: list):
    """An algorithm that XLA could split as it likes, and the shapes that it is called with."""

    def run(p: Problem) -> tuple[jax.Array, jax.Array]:
        shapes.append((p.q.shape, p.v.shape))
        return dispatch.IMPLEMENTATIONS["chunkwise_solve"].algorithm(p, 16)

    return run


@BOTH
@pytest.mark.parametrize(
    ("H", "HV", "local"),
    [(2, 4, ((1, 20, 1, 64), (1, 20, 2, 64))), (1, 4, ((1, 20, 2, 64), (1, 20, 2, 64)))],
    ids=["groups-stay-together", "one-key-head-is-repeated"],
)
def test_devices_get_their_batch_and_heads(kind: AxisType, H: int, HV: int, local: tuple) -> None:
    """Values and gradients are those of the whole problem."""
    p = problem(T=20, H=H, HV=HV, gate="weak", segments=True)
    mesh, shapes = mesh_of(kind), []
    sharded = placed(p, mesh, TOKENS, STATE) if H > 1 else placed(p, mesh, P("data"), P("data"))
    sharded = sharded.with_tokens(v=jax.device_put(p.v, NamedSharding(mesh, TOKENS)))
    got = values_and_gradients(lambda x: over_devices(run_and_record(shapes), x), sharded)
    assert set(shapes) == {local}
    bounds = TOLERANCES["float32"]
    for name, want in expected(p).items():
        forward = name in ("o", "final_state")
        assert_close(name, got[name], want, bounds.forward if forward else bounds.gradient)


@pytest.mark.parametrize(
    ("shape", "B", "HV", "local"),
    [((4,), 4, 4, (1, 4)), ((4,), 1, 4, (1, 1)), ((2, 2), 1, 4, (1, 1)), ((2, 2), 3, 1, (3, 1))],
    ids=["one-axis-batch", "one-axis-heads", "batch-of-one", "nothing-divides"],
)
def test_automatic_axes_split_what_they_divide(
    shape: tuple[int, ...], B: int, HV: int, local: tuple[int, int]
) -> None:
    p, shapes = problem(B=B, T=20, H=HV, HV=HV, state=False), []
    mesh = mesh_of(AxisType.Auto, shape)
    sharded = placed(p, mesh, P(), P())
    got = jax.jit(lambda x: over_devices(run_and_record(shapes), x))(sharded)
    want = dispatch.IMPLEMENTATIONS["chunkwise_solve"].algorithm(p, 16)
    assert [(v[0], v[2]) for _, v in shapes] == [local]
    for x, y in zip(got, want, strict=True):
        assert relative_rms(np.asarray(x), np.asarray(y)) <= 1e-6


def test_one_device_is_left_alone() -> None:
    p, shapes = problem(T=20), []
    over_devices(run_and_record(shapes), p)
    assert shapes == [((2, 20, 2, 64), (2, 20, 2, 64))]


@BOTH
def test_the_kernel_under_jit_with_named_shardings(kind: AxisType) -> None:
    p = problem(T=20, delta=False, state=False)
    sharded = placed(p, mesh_of(kind), TOKENS, STATE)
    got = dispatch.run(
        sharded, algorithm=dispatch.IMPLEMENTATIONS["pallas"].algorithm, chunk_size=16
    )
    want = dispatch.IMPLEMENTATIONS["recurrent"].algorithm(p, None)
    for x, y in zip(got, want, strict=True):
        assert relative_rms(np.asarray(x), np.asarray(y)) <= TOLERANCES["float32"].forward
    assert got[0].sharding.is_equivalent_to(NamedSharding(sharded.v.sharding.mesh, TOKENS), 4)


def test_the_mesh_of_the_arrays_decides_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling for a described chip takes its kernels, whatever device this process has."""
    seen = []
    p = problem(T=20)
    mesh = mesh_of(AxisType.Auto)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def ask(x: Problem) -> jax.Array:
        seen.append(dispatch._platform(x))
        return jnp.zeros(())

    jax.eval_shape(ask, p)
    jax.jit(ask)(placed(p, mesh, TOKENS, STATE))
    assert seen == ["tpu", "cpu"]
