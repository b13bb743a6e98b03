"""The unit lower triangular system of the delta rule."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

__all__ = [
    "diagonal_inverses",
    "substitute",
    "substitute_transposed",
    "unit_lower_inverse",
    "unit_lower_solve",
]

BLOCK = 32  # rows of a diagonal block; the fewer blocks, the sooner it is compiled


@jax.custom_jvp
def unit_lower_solve(
    strict: Float[Array, "*B C C"], rhs: PyTree[Float[Array, "*B C _"]]
) -> PyTree[Float[Array, "*B C _"]]:
    """`(I + L)^-1 R` for a strictly lower triangular `L`; the rest of the matrix is ignored.

    `R` is an array or several. Forward substitution, block of rows after block of rows::

        X_i = (I + L_ii)^-1 (R_i - sum_{j<i} L_ij X_j)

    No power of `L` is formed: with correlated keys its entries grow like binomial
    coefficients while the solution stays small. Nor is the inverse of the whole system: for
    keys that repeat with `beta` near 2 its rows are long alternating sums, and multiplying by
    them costs up to ten times the error of substitution (`docs/mathematics.md`).
    """
    return jax.tree.map(partial(substitute, strict, diagonal_inverses(strict)), rhs)


@unit_lower_solve.defjvp
def _unit_lower_solve_jvp(
    primals: tuple[jax.Array, Any], tangents: tuple[jax.Array, Any]
) -> tuple[Any, Any]:
    """`dX = (I + L)^-1 (dR - dL X)`: the same solve, and its transpose in reverse mode."""
    strict, rhs = primals
    solve = partial(substitute, strict, diagonal_inverses(strict))
    solution = jax.tree.map(solve, rhs)
    d_strict = jnp.tril(tangents[0], -1)
    change = jax.tree.map(lambda d, x: solve(d - _matmul(d_strict, x)), tangents[1], solution)
    return solution, change


def unit_lower_inverse(strict: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """`(I + L)^-1`: the solve for the identity."""
    identity = jnp.eye(strict.shape[-1], dtype=strict.dtype)
    inverse: jax.Array = unit_lower_solve(strict, jnp.broadcast_to(identity, strict.shape))
    return inverse


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def diagonal_inverses(
    strict: Float[Array, "*B C C"], rows: int = BLOCK
) -> tuple[Float[Array, "*B _ _"], ...]:
    """The inverses of diagonal blocks of `rows` rows; the last one may have fewer."""
    starts = range(0, strict.shape[-1], rows)
    return tuple(_ladder(strict[..., s : s + rows, s : s + rows]) for s in starts)


def _with_rows(inverses: Sequence[jax.Array]) -> list[tuple[slice, jax.Array]]:
    """Each inverse with the rows of its block."""
    stops = list(accumulate(inverse.shape[-1] for inverse in inverses))
    return [(slice(s, e), x) for s, e, x in zip([0, *stops], stops, inverses, strict=False)]


def _ladder(strict: Float[Array, "*B b b"]) -> Float[Array, "*B b b"]:
    """`(I + L)^-1`, merged from blocks of 1, 2, 4, ... rows: `X <- X - X L_21 X`.

    Products alone: a compiler makes the loops of a substitution row by row three times as long.
    """
    b, front = strict.shape[-1], tuple(range(strict.ndim - 2))

    def below(size: int) -> jax.Array:
        """`L_21`: every odd block of `size` rows, in the columns of the block before it."""
        block = np.arange(b) // size
        pair = (block[:, None] % 2 == 1) & (block == block[:, None] - 1)
        return jnp.where(np.expand_dims(pair, front), strict, 0)

    X = jnp.subtract(np.expand_dims(np.eye(b, dtype=strict.dtype), front), below(1))
    size = 2
    while size < b:
        X = X - _matmul(X, _matmul(below(size), X))
        size *= 2
    return X


def substitute(
    strict: Float[Array, "*B C C"],
    inverses: Sequence[Float[Array, "*B _ _"]],
    rhs: Float[Array, "*B C V"],
) -> Float[Array, "*B C V"]:
    """`X_i = (I + L_ii)^-1 (R_i - sum_{j<i} L_ij X_j)`; linear in `rhs`."""
    solved: list[jax.Array] = []
    for rows, inverse in _with_rows(inverses):
        right = rhs[..., rows, :]
        if solved:
            known = jnp.concatenate(solved, axis=-2)
            right = right - _matmul(strict[..., rows, : rows.start], known)
        solved.append(_matmul(inverse, right))
    return jnp.concatenate(solved, axis=-2)


def substitute_transposed(
    strict: Float[Array, "*B C C"],
    inverses: Sequence[Float[Array, "*B _ _"]],
    rhs: Float[Array, "*B C V"],
) -> Float[Array, "*B C V"]:
    """`X_i = (I + L_ii)^-T (R_i - sum_{j>i} L_ji^T X_j)`: the transpose of `substitute`."""
    solved: list[jax.Array] = []
    for rows, inverse in reversed(_with_rows(inverses)):
        right = rhs[..., rows, :]
        if solved:
            known = jnp.concatenate(solved, axis=-2)
            right = right - _matmul(jnp.swapaxes(strict[..., rows.stop :, rows], -1, -2), known)
        solved.insert(0, _matmul(jnp.swapaxes(inverse, -1, -2), right))
    return jnp.concatenate(solved, axis=-2)
