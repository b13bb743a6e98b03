"""The unit lower triangular inverse, on the systems that break inverses by powers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import compat
from deltanet_jax.core.triangular import unit_lower_inverse, unit_lower_solve
from tests.cases import rng_for, unit
from tests.tolerances import TOLERANCES, assert_close

INVERSE = jax.jit(unit_lower_inverse)
SIZES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 100, 127, 128, 130)


def _system(C: int, cos: float, beta: float, batch: tuple[int, ...] = (2,)) -> np.ndarray:
    """`beta_i k_i k_j^T` below the diagonal, for keys of mutual cosine `cos`."""
    rng = rng_for("system", C, cos, beta)
    common, noise = unit(rng.standard_normal((*batch, 1, 32))), rng.standard_normal((*batch, C, 32))
    keys = unit(np.sqrt(cos) * common + np.sqrt(1 - cos) * unit(noise))
    return np.tril(beta * keys @ np.swapaxes(keys, -1, -2), -1).astype(np.float32)


def _inverse(L: np.ndarray) -> np.ndarray:
    return np.linalg.inv(np.eye(L.shape[-1]) + L.astype(np.float64))


def _stable_bound(L: np.ndarray, X: np.ndarray) -> float:
    """Bound the error of any order of summation: eps |X| |I + L| |X|, relative to X."""
    error = 2**-24 * np.abs(X) @ np.abs(np.eye(L.shape[-1]) + L) @ np.abs(X)
    return float(np.sqrt(np.mean(error**2) / np.mean(X**2)))


@pytest.mark.parametrize("C", SIZES)
def test_inverse_of_correlated_systems(C: int) -> None:
    """Cos 1 and beta 1 make powers of `L` grow like binomial coefficients."""
    systems = [(0.0, 1.0), (0.6, 1.0), (0.6, 2.0), (0.9, 1.0), (0.9, 2.0), (1.0, 1.0), (1.0, 2.0)]
    L = np.stack([_system(C, cos, beta) for cos, beta in systems])
    got = INVERSE(L)
    assert got.dtype == jnp.float32
    for i, (cos, beta) in enumerate(systems):
        X = _inverse(L[i])
        bound = _stable_bound(L[i], X)
        if C <= 64:  # what the chunk forms use by default
            bound = min(bound, TOLERANCES["float32"].forward)
        assert_close(f"{cos=} {beta=}", got[i], X, bound)


@pytest.mark.parametrize("C", [5, 64, 100])
def test_entries_on_and_above_the_diagonal_are_ignored(C: int) -> None:
    L = _system(C, 0.6, 1.0)
    junk = np.triu(np.full_like(L, np.nan))
    np.testing.assert_array_equal(INVERSE(L + junk), INVERSE(L))


@pytest.mark.parametrize("C", [17, 100])
def test_float64_is_inverted_in_float64(C: int) -> None:
    L = _system(C, 0.9, 2.0).astype(np.float64)
    with compat.enable_x64():
        got = np.asarray(INVERSE(L))
    assert got.dtype == np.float64
    assert_close("inverse", got, _inverse(L), 1e-13)


@pytest.mark.parametrize("C", [3, 40, 130])
def test_tangent_and_gradient(C: int) -> None:
    """`dX = -X dL X`, `dL = -stril(X^T dX X^T)`; nothing flows from above the diagonal."""
    L, rng = _system(C, 0.9, 1.5), rng_for("tangent", C)
    dL, dX = (rng.standard_normal(L.shape).astype(np.float32) for _ in range(2))

    @jax.jit
    def both(L: jax.Array, dL: jax.Array, dX: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, tangent = jax.jvp(unit_lower_inverse, (L,), (dL,))
        _, pull = jax.vjp(unit_lower_inverse, L)
        return tangent, pull(dX)[0]

    tangent, gradient = both(L, dL, dX)
    X = _inverse(L)
    XT = np.swapaxes(X, -1, -2)
    assert_close("tangent", tangent, -X @ np.tril(dL, -1).astype(np.float64) @ X, 1e-5)
    assert_close("gradient", gradient, np.tril(-XT @ dX.astype(np.float64) @ XT, -1), 1e-5)


@pytest.mark.parametrize("C", [3, 40, 64])
def test_solve_and_its_derivatives(C: int) -> None:
    """`dX = (I+L)^-1 (dR - dL X)`; the gradients are `Y = (I+L)^-T dX` and `-stril(Y X^T)`."""
    L, rng = _system(C, 0.9, 1.5), rng_for("solve", C)
    R, dR, dX = (jnp.asarray(rng.standard_normal((2, C, 7)), jnp.float32) for _ in range(3))
    dL = jnp.asarray(rng.standard_normal(L.shape), jnp.float32)

    @jax.jit
    def everything(L: jax.Array, R: jax.Array) -> tuple:
        _, tangent = jax.jvp(unit_lower_solve, (L, R), (dL, dR))
        solution, pull = jax.vjp(unit_lower_solve, L, R)
        return solution, tangent, pull(dX)

    solution, tangent, (gL, gR) = everything(L, R)
    inverse, wide = _inverse(L), lambda x: np.asarray(x, np.float64)
    X, Y = inverse @ wide(R), np.swapaxes(inverse, 1, 2) @ wide(dX)
    assert_close("solution", solution, X, 1e-5)
    assert_close("tangent", tangent, inverse @ (wide(dR) - np.tril(wide(dL), -1) @ X), 1e-5)
    assert_close("dL", gL, -np.tril(Y @ np.swapaxes(X, 1, 2), -1), 1e-5)
    assert_close("dR", gR, Y, 1e-5)


def test_second_derivatives_exist() -> None:
    L = jnp.asarray(_system(4, 0.6, 1.0, batch=()))
    loss = lambda x: jnp.sum(unit_lower_inverse(x) ** 2)  # noqa: E731
    hessian = jax.jit(jax.jacfwd(jax.grad(loss)))(L).reshape(16, 16)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-4)
    assert float(jnp.abs(hessian).max()) > 0.1


def test_leading_axes_and_vmap() -> None:
    L = _system(20, 0.6, 1.0, batch=(2, 3))
    want = INVERSE(L)
    assert want.shape == (2, 3, 20, 20)
    np.testing.assert_allclose(jax.jit(jax.vmap(unit_lower_inverse))(L), want, atol=1e-6)
    np.testing.assert_allclose(INVERSE(L[1, 2]), want[1, 2], atol=1e-6)
