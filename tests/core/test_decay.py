"""Decay factors and scores: exact sums, for every kind of gate, after huge gates too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.core.decay import decay_from_start, decay_to_end, scores, total_decay
from tests.cases import rng_for
from tests.tolerances import assert_close

HIGHEST = jax.lax.Precision.HIGHEST
SCORES = jax.jit(scores, static_argnames=("strict", "precision"))
GATES = {
    "weak": lambda rng, shape: rng.uniform(-0.01, 0, shape),
    "strong": lambda rng, shape: rng.uniform(-8, -2, shape),
    "huge": lambda rng, shape: np.where(rng.random(shape) < 0.15, -1000.0, -0.01),
}
LENGTHS = (1, 7, 16, 17, 64, 80)
K = 6


def _range_decay(g: np.ndarray) -> np.ndarray:
    """`exp(sum_{j < l <= i} g_l)` for j <= i, else 0: `[C, C, D]`, by explicit loops."""
    C, D = g.shape
    out = np.zeros((C, C, D))
    for i in range(C):
        for j in range(i + 1):
            out[i, j] = np.exp(np.sum(g[j + 1 : i + 1].astype(np.float64), axis=0))
    return out


def _gate(kind: str, C: int, D: int) -> np.ndarray:
    return GATES[kind](rng_for("gate", kind, C, D), (C, D)).astype(np.float32)


@pytest.mark.parametrize("D", [1, K], ids=["scalar", "vector"])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("C", LENGTHS)
def test_scores_equal_the_sum_over_explicit_ranges(C: int, kind: str, D: int) -> None:
    rng, g = rng_for("scores", C), _gate(kind, C, D)
    x, y = (rng.standard_normal((C, K)).astype(np.float32) for _ in range(2))
    decay = np.broadcast_to(_range_decay(g), (C, C, K))
    want = np.einsum("ik,jk,ijk->ij", x.astype(np.float64), y.astype(np.float64), decay)
    for strict in (False, True):
        got = SCORES(x, y, g, strict=strict, precision=HIGHEST)
        assert_close(f"{strict=}", got, np.tril(want, -strict), 2e-6)
        # A tail that decayed must be right too, which an rms over all entries would not show.
        np.testing.assert_allclose(got, np.tril(want, -strict), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_scores_without_a_gate_are_masked_products(strict: bool) -> None:
    rng = rng_for("plain")
    x, y = (rng.standard_normal((3, 20, K)).astype(np.float32) for _ in range(2))
    got = scores(jnp.asarray(x), jnp.asarray(y), None, strict=strict, precision=HIGHEST)
    assert_close("scores", got, np.tril(x @ np.swapaxes(y, 1, 2), -strict), 1e-6)


@pytest.mark.parametrize("D", [1, K], ids=["scalar", "vector"])
@pytest.mark.parametrize("kind", GATES)
def test_decay_factors_of_a_chunk(kind: str, D: int) -> None:
    g = _gate(kind, 40, D)
    wide = g.astype(np.float64)
    after = np.stack([np.sum(wide[i + 1 :], axis=0) for i in range(40)])
    close = {"rtol": 1e-5, "atol": 1e-30}
    np.testing.assert_allclose(
        decay_from_start(jnp.asarray(g)), np.exp(np.cumsum(wide, axis=0)), **close
    )
    np.testing.assert_allclose(decay_to_end(jnp.asarray(g)), np.exp(after), **close)
    total = total_decay(jnp.asarray(g))
    assert total.shape == (D, 1)
    np.testing.assert_allclose(total[:, 0], np.exp(wide.sum(0)), **close)


@pytest.mark.parametrize("D", [1, K], ids=["scalar", "vector"])
def test_what_follows_a_reset_keeps_its_digits(D: int) -> None:
    """A difference of cumulative sums would round -1e-3 beside -1000 to a multiple of 6e-5."""
    g = np.full((24, D), -1e-3, np.float32)
    g[5] = -1000.0
    ones = np.ones((24, K), np.float32)
    got = SCORES(ones, ones, g, strict=False, precision=HIGHEST)
    np.testing.assert_allclose(got[23, 6], K * np.exp(-17e-3), rtol=1e-6)
    np.testing.assert_array_equal(got[5:, :5], 0)


@pytest.mark.parametrize("D", [1, K], ids=["scalar", "vector"])
@pytest.mark.parametrize("kind", ["strong", "huge"])
def test_gradients_are_those_of_explicit_ranges(kind: str, D: int) -> None:
    C, rng, g = 33, rng_for("grad"), _gate(kind, 33, D)
    x, y = (rng.standard_normal((C, K)).astype(np.float32) for _ in range(2))
    d = rng.standard_normal((C, C)).astype(np.float32)
    _, pull = jax.vjp(lambda *a: scores(*a, strict=True, precision=HIGHEST), x, y, g)
    dx, dy, dg = jax.jit(pull)(jnp.asarray(d))
    decay = np.broadcast_to(_range_decay(g), (C, C, K))
    weighted = np.tril(d.astype(np.float64), -1)[..., None] * decay
    terms = weighted * x[:, None] * y[None]
    want_dg = np.stack([terms[t:, :t].sum((0, 1)) for t in range(C)])
    want_dg = want_dg if D == K else want_dg.sum(-1, keepdims=True)
    assert_close("dx", dx, np.einsum("ijk,jk->ik", weighted, y), 1e-5)
    assert_close("dy", dy, np.einsum("ijk,ik->jk", weighted, x), 1e-5)
    assert_close("dg", dg, want_dg, 1e-5)


def test_no_gate_has_no_factor() -> None:
    assert decay_from_start(None) is decay_to_end(None) is total_decay(None) is None
