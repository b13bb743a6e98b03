"""The unit lower triangular system of the delta rule, and its WY factors."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

__all__ = ["unit_lower_inverse", "unit_lower_solve"]

BLOCK = 16  # rows solved one by one before blocks are merged


@jax.custom_jvp
def unit_lower_inverse(strict: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """`(I + L)^-1` for a strictly lower triangular `L`; the rest of the matrix is ignored.

    Forward substitution on 16x16 diagonal blocks, then merges of neighbouring blocks::

        [[X1, 0], [-X2 L21 X1, X2]]  =  [[I + L11, 0], [L21, I + L22]]^-1

    No power of `L` is formed: with correlated keys its entries grow like binomial
    coefficients while the inverse stays small (`docs/mathematics.md`).
    """
    C = strict.shape[-1]
    size = _padded_size(C)
    strict = jnp.pad(strict, [(0, 0)] * (strict.ndim - 2) + [(0, size - C)] * 2)
    block = min(BLOCK, size)
    inverse = _substitute(_diagonal_blocks(strict, block))
    while block < size:
        inverse = _merge(strict, inverse, block)
        block *= 2
    return inverse[..., 0, :C, :C]


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`d(I + L)^-1 = -(I + L)^-1 dL (I + L)^-1`: two products instead of a differentiated loop."""
    inverse = unit_lower_inverse(primals[0])
    tangent = _matmul(_matmul(inverse, jnp.tril(tangents[0], -1)), inverse)
    return inverse, -tangent


@jax.custom_jvp
def unit_lower_solve(
    strict: Float[Array, "*B C C"], rhs: Float[Array, "*B C V"]
) -> Float[Array, "*B C V"]:
    """`(I + L)^-1 R`, with a derivative that costs two products and never touches `dT`."""
    return _matmul(unit_lower_inverse(strict), rhs)


@unit_lower_solve.defjvp
def _unit_lower_solve_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`dX = (I + L)^-1 (dR - dL X)`."""
    inverse = unit_lower_inverse(primals[0])
    solution = _matmul(inverse, primals[1])
    change = tangents[1] - _matmul(jnp.tril(tangents[0], -1), solution)
    return solution, _matmul(inverse, change)


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _padded_size(C: int) -> int:
    """The smallest `BLOCK * 2**m` that holds `C` rows, or `C` itself below one block."""
    if C <= BLOCK:
        return C
    size = BLOCK
    while size < C:
        size *= 2
    return size


def _diagonal_blocks(
    matrix: Float[Array, "*B C C"], block: int, below: int = 0
) -> Float[Array, "*B N b b"]:
    """Blocks on the diagonal (`below` 0), or those under every other one (`below` 1)."""
    stride = block * (1 + below)
    starts = range(0, matrix.shape[-1], stride)
    rows = [s + below * block for s in starts]
    pairs = zip(rows, starts, strict=True)
    return jnp.stack([matrix[..., r : r + block, c : c + block] for r, c in pairs], axis=-3)


def _substitute(strict: Float[Array, "*B b b"]) -> Float[Array, "*B b b"]:
    """Forward substitution, one row after another: `x_i = e_i - sum_{j<i} L_ij x_j`."""
    size = strict.shape[-1]
    identity = np.eye(size, dtype=strict.dtype)
    rows = [jnp.broadcast_to(identity[0], (*strict.shape[:-2], size))]
    for i in range(1, size):
        known = jnp.stack(rows, axis=-2)
        rows.append(identity[i] - jnp.sum(strict[..., i, :i, None] * known, axis=-2))
    return jnp.stack(rows, axis=-2)


def _merge(
    strict: Float[Array, "*B C C"], inverse: Float[Array, "*B N b b"], block: int
) -> Float[Array, "*B M d d"]:
    """Inverses of blocks of `2 * block` rows from those of `block` rows."""
    first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    corner = -_matmul(_matmul(second, _diagonal_blocks(strict, block, below=1)), first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    bottom = jnp.concatenate([corner, second], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)
