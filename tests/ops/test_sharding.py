"""Batch and heads split over devices, by `shard_map` and by named shardings."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.cases import IMPLEMENTATIONS, Inputs, Shape, layer_like
from tests.checks import call
from tests.oracle import cotangents_for, expected
from tests.tolerances import TOLERANCES, assert_close

SHAPE = Shape(2, 37, 2, 6, 8, group=2)
FORWARD, GRADIENT = TOLERANCES["float32"]
SPECS = {
    "q": P("data", None, "model"),
    "k": P("data", None, "model"),
    "v": P("data", None, "model"),
    "g": P("data", None, "model"),
    "beta": P("data", None, "model"),
    "initial_state": P("data", "model"),
    "segment_ids": P("data"),
}
ALL = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def _mesh(kind: AxisType) -> jax.sharding.Mesh:
    assert jax.device_count() >= 4, "conftest.py forces host devices"
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


def _case(variant: str) -> tuple[Inputs, dict]:
    inputs = layer_like(variant, SHAPE)
    ids = np.zeros((2, 37), np.int32)
    ids[1, 20:] = 1
    return inputs, {"segment_ids": ids}


def _program(implementation: str, x: dict, ids: dict, cotangents: tuple) -> tuple:
    options = IMPLEMENTATIONS[implementation]
    outputs, pull = jax.vjp(lambda x: call(x | ids, **options), x)
    return outputs, pull(cotangents)[0]


def _check(outputs: tuple, gradients: dict, inputs: Inputs, ids: dict) -> None:
    want = expected(inputs | ids)
    assert_close("o", outputs[0], want.o, FORWARD)
    assert_close("state", outputs[1], want.state, FORWARD)
    for name, gradient in want.gradients.items():
        assert_close(f"d{name}", gradients[name], gradient, GRADIENT)


@pytest.mark.parametrize("variant", ["delta", "kda"])
@ALL
def test_shard_map_with_its_checks(variant: str, implementation: str) -> None:
    """`check_vma` stays on; without an initial state the carry must still vary over the mesh."""
    inputs, ids = _case(variant)
    if variant == "delta":
        del inputs["initial_state"]
    mesh = _mesh(AxisType.Auto)
    specs, results = {n: SPECS[n] for n in inputs}, (SPECS["v"], SPECS["initial_state"])
    program = jax.shard_map(
        partial(_program, implementation),
        mesh=mesh,
        in_specs=(specs, {"segment_ids": SPECS["segment_ids"]}, results),
        out_specs=(results, specs),
    )
    outputs, gradients = jax.jit(program)(inputs, ids, cotangents_for(inputs))
    _check(outputs, gradients, inputs, ids)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("variant", ["gated_delta", "kda"])
@ALL
def test_named_shardings(implementation: str, variant: str, kind: AxisType) -> None:
    """Inputs that are sharded stay sharded: outputs keep the spec of `v`."""
    inputs, ids = _case(variant)
    mesh = _mesh(kind)
    place = lambda name, x: jax.device_put(x, NamedSharding(mesh, SPECS[name]))  # noqa: E731
    sharded = {n: place(n, x) for n, x in inputs.items()}
    sharded_ids = {n: place(n, x) for n, x in ids.items()}
    do, dstate = cotangents_for(inputs)
    cotangents = place("v", do), place("initial_state", dstate)
    with jax.set_mesh(mesh):
        outputs, gradients = jax.jit(partial(_program, implementation))(
            sharded, sharded_ids, cotangents
        )
    _check(outputs, gradients, inputs, ids)
    if kind == AxisType.Explicit:
        assert outputs[0].sharding.spec[0] == "data"
        assert outputs[0].sharding.spec[2] == "model"


@pytest.mark.parametrize("variant", ["delta", "gated_delta", "kda"])
@ALL
def test_an_axis_of_vmap_that_is_sharded_explicitly(implementation: str, variant: str) -> None:
    """Per-example gradients, the examples split over devices."""
    inputs, ids = _case(variant)
    if variant == "delta":
        del inputs["initial_state"]
    mesh = _mesh(AxisType.Explicit)

    def place(name: str, x: np.ndarray) -> jax.Array:
        spec = P("data", None, *SPECS[name][1:])
        return jax.device_put(np.stack([x, x[::-1]]), NamedSharding(mesh, spec))

    sharded = {n: place(n, x) for n, x in inputs.items()}
    sharded_ids = {n: place(n, x) for n, x in ids.items()}
    do, dstate = cotangents_for(inputs)
    cotangents = place("v", do), place("initial_state", dstate)
    with jax.set_mesh(mesh):
        program = jax.vmap(partial(_program, implementation), spmd_axis_name="data")
        outputs, gradients = jax.jit(program)(sharded, sharded_ids, cotangents)
    for example in range(2):
        first = lambda x: np.asarray(x)[example, :: 1 - 2 * example]  # noqa: E731
        _check(*jax.tree.map(first, (outputs, gradients)), inputs, ids)


def test_named_shardings_outside_jit() -> None:
    inputs, ids = _case("delta")
    mesh = _mesh(AxisType.Auto)
    sharded = {
        n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in (inputs | ids).items()
    }
    o, state = call(sharded, implementation="chunkwise")
    want = expected(inputs | ids)
    assert_close("o", o, want.o, FORWARD)
    assert_close("state", state, want.state, FORWARD)


def test_shard_map_of_vmap_of_grad_sums_over_devices() -> None:
    """A replicated weight inside `shard_map` gets the sum of its devices' gradients."""
    inputs, _ = _case("delta")
    del inputs["initial_state"]
    mesh = _mesh(AxisType.Auto)
    specs = {n: P("data") for n in inputs}

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), specs), out_specs=P())
    def gradient(gain: jax.Array, x: dict) -> jax.Array:
        def loss(gain: jax.Array) -> jax.Array:
            o, _ = call(x | {"v": gain * x["v"]}, implementation="chunkwise")
            return jax.lax.psum(jnp.sum(o), "data")

        return jax.grad(loss)(gain)

    got = jax.jit(gradient)(jnp.float32(1.5), inputs)
    want = expected(inputs).o.sum()  # the loss is linear in the gain
    np.testing.assert_allclose(got, want, rtol=1e-4)
