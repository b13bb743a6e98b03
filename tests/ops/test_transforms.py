"""The same numbers under every transformation of JAX, and their combinations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import linear_attention
from tests.cases import IMPLEMENTATIONS, Inputs, Shape, layer_like, rng_for
from tests.oracle import cotangents_for, expected
from tests.tolerances import TOLERANCES, assert_close

SHAPE = Shape(2, 37, 2, 8, 8)
FORWARD, GRADIENT = TOLERANCES["float32"]
ALL = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def _call(implementation: str, x: Inputs) -> tuple[jax.Array, jax.Array]:
    options = IMPLEMENTATIONS[implementation]
    return linear_attention(**x, **({"chunk_size": 16} if len(options) == 1 else {}) | options)


def _inputs() -> Inputs:
    return layer_like("kda", SHAPE)


def _loss(implementation: str, x: Inputs) -> jax.Array:
    o, state = _call(implementation, x)
    do, dstate = cotangents_for(_inputs())
    return jnp.sum(o * do) + jnp.sum(state * dstate)


@ALL
def test_vmap_over_an_extra_axis(implementation: str) -> None:
    """Values and gradients; `beta` is not mapped, and `v` is mapped at another axis."""
    one, two = _inputs(), layer_like("kda", SHAPE, seed=1)
    two["beta"] = one["beta"]
    axes = dict.fromkeys(one, 0) | {"v": 2, "beta": None}
    stacked = {
        n: one[n] if axes[n] is None else np.stack([one[n], two[n]], axis=axes[n]) for n in one
    }
    value_and_grad = jax.value_and_grad(partial(_loss, implementation))
    values, gradients = jax.jit(jax.vmap(value_and_grad, in_axes=(axes,)))(stacked)
    for i, x in enumerate((one, two)):
        want = expected(x)
        do, dstate = cotangents_for(x)
        total = np.sum(want.o * do) + np.sum(want.state * dstate)
        np.testing.assert_allclose(values[i], total, rtol=1e-5, atol=1e-3)
        for name, gradient in want.gradients.items():
            assert_close(f"d{name}[{i}]", gradients[name][i], gradient, GRADIENT)


@ALL
def test_scan_over_checkpointed_layers(implementation: str) -> None:
    """`grad` of a `scan` of `checkpoint`ed layers equals a Python loop of the oracle."""
    inputs = layer_like("gated_delta", Shape(1, 37, 2, 8, 8))
    depth, rest = 3, {n: x for n, x in inputs.items() if n != "v"}
    gains = np.linspace(0.5, 1.5, depth).astype(np.float32)
    do = cotangents_for(inputs)[0]

    @jax.jit
    @jax.grad
    def gradient(v: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(v: jax.Array, gain: jax.Array) -> tuple[jax.Array, None]:
            o, _ = _call(implementation, rest | {"v": v * gain})
            return v + o, None

        return jnp.sum(jax.lax.scan(layer, v, gains)[0] * do)

    # Every layer is linear in v with one matrix up to its gain, so the oracle's pullback is
    # applied `depth` times.
    want = do.astype(np.float64)
    still = np.zeros_like(inputs["initial_state"])
    for gain in gains[::-1]:
        want = want + gain * expected(inputs, (want, still)).gradients["v"]
    assert_close("dv", gradient(inputs["v"]), want, GRADIENT)


@ALL
def test_forward_mode_is_the_transpose_of_reverse_mode(implementation: str) -> None:
    """`<c, J t> = <J^T c, t>` with the oracle's gradients, for a random direction."""
    inputs, want = _inputs(), expected(_inputs())
    rng = rng_for("tangents")
    tangents = {n: rng.standard_normal(x.shape).astype(np.float32) for n, x in inputs.items()}
    call = partial(_call, implementation)
    (o, _), (to, tstate) = jax.jit(lambda x, t: jax.jvp(call, (x,), (t,)))(inputs, tangents)
    do, dstate = (c.astype(np.float64) for c in cotangents_for(inputs))
    forward = np.sum(do * np.asarray(to)) + np.sum(dstate * np.asarray(tstate))
    terms = [np.sum(want.gradients[n] * tangents[n]) for n in inputs]
    np.testing.assert_allclose(forward, sum(terms), rtol=1e-4, atol=1e-4 * np.abs(terms).max())
    assert_close("o", o, want.o, FORWARD)


@ALL
def test_jacfwd_equals_jacrev(implementation: str) -> None:
    inputs = layer_like("gated_delta", Shape(1, 5, 1, 3, 2))
    readout = lambda beta: _call(implementation, inputs | {"beta": beta})[0]  # noqa: E731
    forward, reverse = (jax.jit(jac(readout))(inputs["beta"]) for jac in (jax.jacfwd, jax.jacrev))
    assert_close("jacobian", forward, reverse, 1e-5)
    assert not np.any(
        np.triu(np.ones((5, 5)), 1)[..., None] * forward[0, :, 0, :, 0, :, 0].swapaxes(1, 2)
        if forward.ndim == 7
        else 0
    )


@ALL
def test_hessian_vector_product(implementation: str) -> None:
    """Forward over reverse, symmetric: `<u, H w> = <w, H u>`."""
    inputs = layer_like("gated_delta", Shape(1, 19, 1, 4, 3))
    rng = rng_for("hessian")
    u, w = (rng.standard_normal(inputs["k"].shape).astype(np.float32) for _ in range(2))

    @jax.jit
    def product(k: jax.Array, direction: jax.Array) -> jax.Array:
        loss = lambda k: jnp.sum(_call(implementation, inputs | {"k": k})[0] ** 2)  # noqa: E731
        return jax.jvp(jax.grad(loss), (k,), (direction,))[1]

    left, right = np.sum(u * product(inputs["k"], w)), np.sum(w * product(inputs["k"], u))
    assert abs(left) > 1e-2
    np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-3)


@ALL
def test_eval_shape_aot_and_donation(implementation: str) -> None:
    """One compiled program, three properties: shapes, ahead-of-time calls, a donated state."""
    inputs = {n: jnp.asarray(x) for n, x in _inputs().items()}
    call = partial(_call, implementation)
    shapes = jax.eval_shape(call, inputs)
    assert [s.shape for s in shapes] == [(2, 37, 2, 8), (2, 2, 8, 8)]

    def continued(state: jax.Array, rest: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return call(rest | {"initial_state": state})

    state = inputs.pop("initial_state")
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, inputs))
    compiled = jax.jit(continued, donate_argnums=0).lower(*structs).compile()
    want = expected(_inputs())
    o, final = compiled(state + 0, inputs)
    assert_close("o", o, want.o, FORWARD)
    assert_close("state", final, want.state, FORWARD)


@ALL
def test_jit_equals_eager(implementation: str) -> None:
    inputs = _inputs()
    eager = _call(implementation, inputs)
    with jax.disable_jit(False):
        traced = jax.jit(partial(_call, implementation))(inputs)
    for name, x, y in zip(("o", "state"), eager, traced, strict=True):
        assert_close(name, x, y, 1e-6)


@ALL
def test_unused_outputs_cost_no_gradient(implementation: str) -> None:
    """A loss of one output only: the other's cotangent is a symbolic zero."""
    inputs = _inputs()
    do, dstate = cotangents_for(inputs)
    of_o = jax.grad(lambda x: jnp.sum(_call(implementation, x)[0] * do))
    of_state = jax.grad(lambda x: jnp.sum(_call(implementation, x)[1] * dstate))
    got_o, got_state = jax.jit(lambda x: (of_o(x), of_state(x)))(inputs)
    want_o = expected(inputs, (do, 0 * dstate)).gradients
    want_state = expected(inputs, (0 * do, dstate)).gradients
    assert not np.any(got_state["q"])
    for name in inputs:
        assert_close(f"d{name} of o", got_o[name], want_o[name], GRADIENT)
        assert_close(f"d{name} of state", got_state[name], want_state[name], GRADIENT)


@ALL
def test_gradients_without_initial_state_inside_scan(implementation: str) -> None:
    """`initial_state=None` under `grad` of `scan` of `jit`, where constants become carries."""
    inputs = layer_like("delta", Shape(1, 20, 1, 4, 4))
    del inputs["initial_state"]

    @jax.jit
    @jax.grad
    def gradient(v: jax.Array) -> jax.Array:
        layer = lambda v, _: (_call(implementation, inputs | {"v": v})[0], None)  # noqa: E731
        return jnp.sum(jax.lax.scan(layer, v, None, length=2)[0])

    want = np.ones(inputs["v"].shape)
    for _ in range(2):
        want = expected(inputs, (want, np.zeros((1, 1, 4, 4)))).gradients["v"]
    assert_close("dv", gradient(inputs["v"]), want, GRADIENT)


def test_a_scan_that_is_not_jitted_closes_over_gates() -> None:
    """Their sign can be checked there, as they are known, and growth is still refused."""
    x = layer_like("gated_delta", SHAPE)
    state = jnp.asarray(x.pop("initial_state"))

    def repeat(g: jax.Array) -> jax.Array:
        again = x | {"g": jnp.asarray(g), "implementation": "recurrent"}
        run = lambda s, _: (linear_attention(**again, initial_state=s)[1], None)  # noqa: E731
        return jax.lax.scan(run, state, length=2)[0]

    want = state
    for _ in range(2):
        want = linear_attention(**x, initial_state=want, implementation="recurrent")[1]
    assert_close("state", repeat(x["g"]), want, TOLERANCES["float32"].forward)
    with pytest.raises(ValueError, match="`g` is a log-decay"):
        repeat(-x["g"])
