"""The single step, the canonical problem's helpers, and the one matrix product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import compat
from deltanet_jax.core import reference
from deltanet_jax.core.numerics import accumulation_dtype, dot
from deltanet_jax.core.problem import Problem, Tokens, decay_with_resets
from deltanet_jax.core.step import step
from tests.cases import VARIANTS, Shape, layer_like, rng_for
from tests.tolerances import assert_close

SHAPE = Shape(2, 1, 3, 4, 5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_step_is_one_token_of_the_oracle(variant: str) -> None:
    inputs = layer_like(variant, SHAPE)
    token = {name: jnp.asarray(x[:, 0]) for name, x in inputs.items() if name != "initial_state"}
    columns = {name: x if x.ndim == 3 else x[..., None] for name, x in token.items()}
    o, state = step(jnp.asarray(inputs["initial_state"]), Tokens(**columns))
    rest = {name: x for name, x in inputs.items() if name not in "qkv"}
    want = reference.recurrence(inputs["q"], inputs["k"], inputs["v"], scale=1.0, **rest)
    assert_close("o", o, want[0][:, 0], 1e-6)
    assert_close("state", state, want[1], 1e-6)


def test_step_forgets_everything_at_minus_infinity() -> None:
    k = jnp.ones((1, 2))
    token = Tokens(k, k, jnp.ones((1, 1)), g=jnp.full((1, 1), -jnp.inf))
    o, state = step(jnp.full((1, 2, 1), 7.0), token)
    np.testing.assert_array_equal(state, np.ones((1, 2, 1)))
    assert o.item() == 2.0


def _problem(g: jax.Array | None, reset: jax.Array | None) -> Problem:
    x = jnp.ones((1, 3, 1, 2))
    return Problem(Tokens(x, x, x, g), reset=reset)


RESET = jnp.asarray([[False, True, False]])


def test_resets_are_written_into_every_kind_of_gate() -> None:
    for g in (None, jnp.full((1, 3, 1), -0.5), jnp.full((1, 3, 1, 2), -0.5)):
        decay = np.exp(decay_with_resets(_problem(g, RESET)))
        kept = 1.0 if g is None else np.exp(np.float32(-0.5))
        assert np.all(decay[:, 1] == 0)
        np.testing.assert_array_equal(decay[:, ::2], np.full_like(decay[:, ::2], kept))


def test_gates_are_finite_after_the_clamp_and_still_exact_resets() -> None:
    g = decay_with_resets(_problem(jnp.asarray([[[-jnp.inf], [-1e30], [-0.0]]]), None))
    assert np.all(np.isfinite(g))
    np.testing.assert_array_equal(np.exp(g).ravel(), [0, 0, 1])
    with compat.enable_x64():
        assert np.exp(np.asarray(g, np.float64)).ravel()[0] == 0


def test_no_gate_and_no_reset_is_no_decay() -> None:
    assert decay_with_resets(_problem(None, None)) is None


def test_repeated_keys_follow_their_group() -> None:
    q = jnp.arange(2.0).reshape(1, 1, 2, 1)
    problem = Problem(Tokens(q, q + 5, jnp.ones((1, 1, 6, 1))))
    repeated = problem.with_repeated_keys()
    np.testing.assert_array_equal(repeated.q.ravel(), [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(repeated.k.ravel(), [5, 5, 5, 6, 6, 6])


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_accumulation_dtype(dtype: str, want: str) -> None:
    with compat.enable_x64():
        assert accumulation_dtype(jnp.ones(2, dtype), jnp.ones(2, "bfloat16")) == want


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dot_of_16_bit_operands_accumulates_in_float32(dtype: str) -> None:
    """4096 ones and one 1/8: a 16-bit sum would lose the last term."""
    x = jnp.concatenate([jnp.ones((1, 4096)), jnp.full((1, 1), 0.125)], axis=1).astype(dtype)
    got = dot("ij,kj->ik", x, jnp.ones_like(x), None)
    assert got.dtype == jnp.float32
    assert got.item() == 4096.125


def test_dot_widens_a_16_bit_operand_beside_a_wide_one() -> None:
    rng = rng_for("dot")
    x = jnp.asarray(rng.standard_normal((8, 64)), jnp.bfloat16)
    y = jnp.asarray(rng.standard_normal((64, 8)), jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    got = dot("ij,jk->ik", x, y, jax.lax.Precision.HIGHEST)
    assert got.dtype == jnp.float32
    assert_close("dot", got, want, 1e-6)
    assert_close("dot", dot("ji,kj->ik", y, x, jax.lax.Precision.HIGHEST), want.T, 1e-6)
