"""The time axis over eight devices gives what one device gives."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from deltanet_jax import compat, parallel
from deltanet_jax.core.affine import AffineMap, apply, compose
from tests.cases import IMPLEMENTATIONS, Inputs, Shape, correlated, layer_like, rng_for
from tests.checks import assert_matches
from tests.oracle import Expected, cotangents_for, expected
from tests.tolerances import TOLERANCES, assert_close

DEVICES = 8
SHAPE = Shape(2, 64, 1, 8, 12, group=2)
TIME = P(None, "context")
PER_TOKEN = ("q", "k", "v", "g", "beta", "segment_ids")
COLLECTIVE = re.compile(
    r"= \(?(\w+)\[([\d,]*)\].* (all-gather|all-reduce|all-to-all|collective-permute|"
    r"reduce-scatter)(?:-start)?\("
)


def _mesh(devices: int = DEVICES) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,))


def _segments() -> np.ndarray:
    """Runs that end at, just before and just after borders of shards, and span several."""
    starts = np.zeros((SHAPE.B, SHAPE.T), np.int32)
    starts[0, [8, 15, 33]] = 1
    starts[1, [7, 8, 9, 40]] = 1
    return np.cumsum(starts, axis=1).astype(np.int32) % 3


def _program(inputs: Inputs, name: str, *, check_vma: bool = True):
    """Outputs and gradients of a run over the mesh, as one function of the inputs."""
    call = partial(parallel.linear_attention, axis_name="context", **IMPLEMENTATIONS[name])
    specs = {n: TIME if n in PER_TOKEN else P() for n in inputs}
    sharded = jax.shard_map(
        lambda x: call(**x),
        mesh=_mesh(),
        in_specs=(specs,),
        out_specs=(TIME, P()),
        check_vma=check_vma,
    )

    def program(x: Inputs, cotangents: tuple) -> tuple:
        fixed = {n: y for n, y in x.items() if n == "segment_ids"}
        floats = {n: y for n, y in x.items() if n not in fixed}
        outputs, pull = jax.vjp(lambda y: sharded(y | fixed), floats)
        return outputs, pull(cotangents)[0]

    return jax.jit(program)


def _check(inputs: Inputs, name: str, **options: bool) -> None:
    program = _program(inputs, name, **options)
    (o, state), gradients = program(inputs, cotangents_for(inputs))
    assert_matches(Expected(o, state, gradients), expected(inputs))


CASES = [
    ("linear", "chunkwise"),
    ("delta", "recurrent"),
    ("scalar_gla", "chunkwise_solve"),
    ("gla", "associative"),
    ("gated_delta", "chunkwise"),
    ("kda", "associative_chunks"),
]


@pytest.mark.parametrize(("variant", "implementation"), CASES)
def test_eight_devices_equal_one(variant: str, implementation: str) -> None:
    """Every other variant is packed; all have a state to start from."""
    inputs = layer_like(variant, SHAPE)
    if variant in ("linear", "gated_delta", "kda"):
        inputs["segment_ids"] = _segments()
    _check(inputs, implementation)


def test_eight_devices_equal_one_for_keys_that_repeat() -> None:
    """Without a state, and in a `shard_map` that does not check how values vary."""
    inputs = correlated("delta", SHAPE, cos=0.99)
    del inputs["initial_state"]
    _check(inputs, "chunkwise", check_vma=False)


def test_only_maps_and_states_travel() -> None:
    """No collective is as large as a shard of any activation, in the backward pass either."""
    shape = Shape(1, 1024, 1, 8, 8)
    inputs = layer_like("gated_delta", shape) | {"segment_ids": np.zeros((1, 1024), np.int32)}
    program = _program(inputs, "recurrent")
    text = program.lower(inputs, cotangents_for(inputs)).compile().as_text()
    sizes = [
        int(np.prod([int(n) for n in dims.split(",") if n]))
        for _, dims, _ in COLLECTIVE.findall(text)
    ]
    assert len(sizes) >= 2 * 3, "three rounds there and back"
    assert max(sizes) <= shape.HV * shape.K * (shape.K + shape.V)
    assert max(sizes) < shape.T // DEVICES * shape.K


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_the_exchange_composes_in_order(devices: int) -> None:
    """`prefix` is the running composition of random maps that do not commute."""
    rng, exact = rng_for("prefix"), jax.lax.Precision.HIGHEST
    draw = lambda n: jnp.asarray(rng.standard_normal((devices, 3, n)), jnp.float32)  # noqa: E731
    maps = AffineMap(draw(3), draw(2))
    spec = P("context")
    run = jax.jit(
        jax.shard_map(
            partial(parallel.prefix, axis_name="context"),
            mesh=_mesh(devices),
            in_specs=spec,
            out_specs=spec,
        )
    )
    got, total = run(maps), None
    for i in range(devices):
        one = AffineMap(maps.A[i], maps.B[i])
        total = one if total is None else compose(total, one, exact)
        assert_close("A", got.A[i], total.A, TOLERANCES["float32"].forward)
        assert_close("B", got.B[i], total.B, TOLERANCES["float32"].forward)
    state = jnp.ones((3, 2))
    assert apply(total, state, exact).shape == (3, 2)


def test_wrong_calls_are_named() -> None:
    inputs = layer_like("delta", SHAPE)
    with pytest.raises(ValueError, match="`axis_name` must be a manual axis.*'context'"):
        parallel.linear_attention(**inputs, axis_name="context")

    def call(x: Inputs) -> tuple:
        state = compat.vary_like(x["initial_state"], x["q"])
        return parallel.linear_attention(**x | {"initial_state": state}, axis_name="context")

    specs = {n: TIME if n in PER_TOKEN else P() for n in inputs}
    varying = jax.shard_map(call, mesh=_mesh(), in_specs=(specs,), out_specs=(TIME, P()))
    with pytest.raises(ValueError, match="`initial_state` must be the same on all devices"):
        jax.eval_shape(varying, inputs)

    def look_back(x: jax.Array) -> jax.Array:
        return parallel.halo(x, 3, "context")

    short = jax.shard_map(look_back, mesh=_mesh(), in_specs=TIME, out_specs=TIME)
    with pytest.raises(ValueError, match="at least the 3 tokens.*got 2 per device"):
        jax.eval_shape(short, jnp.ones((1, 16, 4)))
