"""The unit lower triangular system of the delta rule."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from deltanet_jax import compat

__all__ = [
    "diagonal_inverses",
    "substitute",
    "substitute_transposed",
    "unit_lower_inverse",
    "unit_lower_solve",
]

BLOCK = 32  # rows of a diagonal block, inverted before the substitution
ROWS = 8  # rows that are inverted one after another; larger blocks are merged from these


@jax.custom_jvp
def unit_lower_solve(
    strict: Float[Array, "*B C C"], rhs: Float[Array, "*B C V"]
) -> Float[Array, "*B C V"]:
    """`(I + L)^-1 R` for a strictly lower triangular `L`; the rest of the matrix is ignored.

    Forward substitution, block of rows after block of rows::

        X_i = (I + L_ii)^-1 (R_i - sum_{j<i} L_ij X_j)

    No power of `L` is formed: with correlated keys its entries grow like binomial
    coefficients while the solution stays small. Nor is the inverse of the whole system: for
    keys that repeat with `beta` near 2 its rows are long alternating sums, and multiplying by
    them costs up to ten times the error of substitution (`docs/mathematics.md`).
    """
    return substitute(strict, diagonal_inverses(strict), rhs)


@unit_lower_solve.defjvp
def _unit_lower_solve_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`dX = (I + L)^-1 (dR - dL X)`: the same solve, and its transpose in reverse mode."""
    strict, rhs = primals
    inverses = diagonal_inverses(strict)
    solution = substitute(strict, inverses, rhs)
    change = tangents[1] - _matmul(jnp.tril(tangents[0], -1), solution)
    return solution, substitute(strict, inverses, change)


def unit_lower_inverse(strict: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """`(I + L)^-1`: the solve for the identity."""
    identity = jnp.eye(strict.shape[-1], dtype=strict.dtype)
    return unit_lower_solve(strict, jnp.broadcast_to(identity, strict.shape))


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _block_starts(C: int) -> range:
    return range(0, C, BLOCK)


def diagonal_inverses(strict: Float[Array, "*B C C"]) -> Float[Array, "*B N b b"]:
    """The inverses of the diagonal blocks, the last one padded with rows of the identity."""
    C = strict.shape[-1]
    size = min(BLOCK, C)
    missing = -C % size
    padded = jnp.pad(strict, [(0, 0)] * (strict.ndim - 2) + [(0, missing)] * 2)
    blocks = [padded[..., s : s + size, s : s + size] for s in _block_starts(C)]
    return _merge_inverse(jnp.stack(blocks, axis=-3))


def _merge_inverse(strict: Float[Array, "*B N b b"]) -> Float[Array, "*B N b b"]:
    """Invert blocks `I + L`: their two halves first, then the part below the diagonal."""
    N, size = strict.shape[-3], strict.shape[-1]
    if size <= ROWS or size % 2:
        return _substitute_rows(strict)
    half = size // 2
    # Halves join the axis of the blocks: an axis more, and jaxlib 0.10.2 crashes on the sums.
    halves = [strict[..., :half, :half], strict[..., half:, half:]]
    inverse = _merge_inverse(jnp.concatenate(halves, axis=-3))
    first, second = inverse[..., :N, :, :], inverse[..., N:, :, :]
    below = -_matmul(second, _matmul(strict[..., half:, :half], first))
    top = jnp.concatenate([first, compat.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)


def _substitute_rows(strict: Float[Array, "*B b b"]) -> Float[Array, "*B b b"]:
    """`(I + L)^-1`, one row after another: `x_i = e_i - sum_{j<i} L_ij x_j`."""
    size = strict.shape[-1]
    identity = np.eye(size, dtype=strict.dtype)
    rows = [compat.zeros_like(strict[..., 0, :]) + identity[0]]
    for i in range(1, size):
        known = jnp.stack(rows, axis=-2)
        rows.append(identity[i] - jnp.sum(strict[..., i, :i, None] * known, axis=-2))
    return jnp.stack(rows, axis=-2)


def substitute(
    strict: Float[Array, "*B C C"], inverses: Float[Array, "*B N b b"], rhs: Float[Array, "*B C V"]
) -> Float[Array, "*B C V"]:
    """`X_i = (I + L_ii)^-1 (R_i - sum_{j<i} L_ij X_j)`; linear in `rhs`."""
    C, size = strict.shape[-1], inverses.shape[-1]
    solved: list[jax.Array] = []
    for n, start in enumerate(_block_starts(C)):
        stop = min(start + size, C)
        rows = rhs[..., start:stop, :]
        if solved:
            known = jnp.concatenate(solved, axis=-2)
            rows = rows - _matmul(strict[..., start:stop, :start], known)
        inverse = inverses[..., n, : stop - start, : stop - start]
        solved.append(_matmul(inverse, rows))
    return jnp.concatenate(solved, axis=-2)


def substitute_transposed(
    strict: Float[Array, "*B C C"], inverses: Float[Array, "*B N b b"], rhs: Float[Array, "*B C V"]
) -> Float[Array, "*B C V"]:
    """`X_i = (I + L_ii)^-T (R_i - sum_{j>i} L_ji^T X_j)`: the transpose of `substitute`."""
    C, size = strict.shape[-1], inverses.shape[-1]
    solved: list[jax.Array] = []
    for n, start in reversed(list(enumerate(_block_starts(C)))):
        stop = min(start + size, C)
        rows = rhs[..., start:stop, :]
        if solved:
            known = jnp.concatenate(solved, axis=-2)
            rows = rows - _matmul(jnp.swapaxes(strict[..., stop:, start:stop], -1, -2), known)
        inverse = inverses[..., n, : stop - start, : stop - start]
        solved.insert(0, _matmul(jnp.swapaxes(inverse, -1, -2), rows))
    return jnp.concatenate(solved, axis=-2)
