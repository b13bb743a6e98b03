"""The mathematics of one chunk for the TPU kernels: products and the inverse.

Arrays hold the heads of a cell as their leading axis. Row vectors, as in the mathematics:
`L_ij = beta_i k_i k_j^T exp(b_i - b_j)` for `j < i`, `T = (I + L)^-1`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

__all__ = [
    "ROWS",
    "Precision",
    "accurate",
    "columns",
    "mm",
    "mm_nt",
    "mm_tn",
    "odd_blocks",
    "per_key_head",
    "per_value_head",
    "positions",
    "read",
    "rolled",
    "row_sum",
    "scaled",
    "spread",
    "to_rows",
    "unit_lower_inverse",
    "write",
]

# Of a call's products of inputs; `None` where these have 16 bits.
Precision = jax.lax.Precision | None
Product = Callable[[jax.Array, jax.Array, Precision], jax.Array]

# Rows of a vector register, and of the blocks that are inverted by substitution.
ROWS = 8


def _product(x: jax.Array, y: jax.Array, axes: tuple[int, int], precision: Precision) -> jax.Array:
    return jax.lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def mm(x: jax.Array, y: jax.Array, precision: Precision) -> jax.Array:
    """`x y` for every head."""
    return _product(x, y, (2, 1), precision)


def mm_nt(x: jax.Array, y: jax.Array, precision: Precision) -> jax.Array:
    """`x y^T` for every head."""
    return _product(x, y, (2, 2), precision)


def mm_tn(x: jax.Array, y: jax.Array, precision: Precision) -> jax.Array:
    """`x^T y` for every head."""
    return _product(x, y, (1, 1), precision)


def per_value_head(x: jax.Array, heads: int) -> jax.Array:
    """Repeat the entries of the key heads so that there is one for each value head."""
    n = x.shape[0]
    if n == heads:
        return x
    shape = (n, heads // n, *x.shape[1:])
    return jnp.broadcast_to(x[:, None], shape).reshape(heads, *x.shape[1:])


def per_key_head(x: jax.Array, heads: int) -> jax.Array:
    """Sum over the value heads of each key head."""
    n = x.shape[0]
    return x if n == heads else jnp.sum(x.reshape(heads, n // heads, *x.shape[1:]), axis=1)


def row_sum(x: jax.Array) -> jax.Array:
    """Sum along the last axis, which stays with length 1."""
    return jnp.sum(x, axis=-1, keepdims=True)


def positions(C: int) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers of a `[C, C]` matrix."""
    return (
        jax.lax.broadcasted_iota(jnp.int32, (C, C), 0),
        jax.lax.broadcasted_iota(jnp.int32, (C, C), 1),
    )


def unit_lower_inverse(L: jax.Array, precision: Precision) -> jax.Array:
    """`(I + L)^-1` for strictly lower triangular `L`, `[G, C, C]` with `C` a power of two.

    Rows are substituted inside blocks of 8; then blocks of size b become blocks of size 2b by
    `T - T (L masked to that level) T`. No power of `L` is formed, so that the error stays small
    where the powers are huge.

    Args:
        L: The matrix.
        precision: Precision of the call's other products.
    """
    C = L.shape[-1]
    rows, cols = positions(C)
    T = _block_inverses(L)
    size = ROWS
    while size < C:
        # Only every second block of rows changes: half a product each.
        level = jnp.where(((rows ^ cols) & -size) == size, L, 0.0)
        X = accurate(mm, odd_blocks(level, size), T, precision)
        step = accurate(mm, odd_blocks(T, size), spread(X, size), precision)
        T = T - spread(step, size)
        size *= 2
    return T


def odd_blocks(x: jax.Array, size: int) -> jax.Array:
    """The rows whose block of `size` has an odd number, `[G, C / 2, D]` of `[G, C, D]`."""
    G, C, D = x.shape
    return x.reshape(G, C // (2 * size), 2, size, D)[:, :, 1].reshape(G, C // 2, D)


def spread(x: jax.Array, size: int) -> jax.Array:
    """Undo `odd_blocks`, with zeros in the other rows."""
    G, half, D = x.shape
    x = x.reshape(G, half // size, 1, size, D)
    return jnp.concatenate([jnp.zeros_like(x), x], axis=2).reshape(G, 2 * half, D)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 array as a sum of two bfloat16 arrays, to 2^-16."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def accurate(product: Product, x: jax.Array, y: jax.Array, precision: Precision) -> jax.Array:
    """`product(x, y)` of float32 operands, also where the other operands have 16 bits.

    Three products of 16-bit halves then: a third of the cost of float32, and unlike a precision
    that the compiler realises, the interpreter gives the same digits.
    """
    if precision is not None:
        return product(x, y, jax.lax.Precision.HIGHEST)
    (xh, xl), (yh, yl) = _halves(x), _halves(y)
    return product(xh, yh, None) + (product(xh, yl, None) + product(xl, yh, None))


def _block_inverses(L: jax.Array) -> jax.Array:
    """The inverses of the diagonal blocks of 8 rows of `I + L`, as a block diagonal matrix.

    All blocks of a head lie side by side in one `[8, C]` tile, so that a step of the
    substitution is one multiplication and one subtraction.
    """
    G, C, _ = L.shape
    rows, cols = positions(C)
    same = (rows & -ROWS) == (cols & -ROWS)
    inside = jnp.where(same, L, 0.0)
    tile = jnp.sum(inside.reshape(G, C // ROWS, ROWS, C), axis=1)  # [G, 8, C]
    lane = jax.lax.broadcasted_iota(jnp.int32, (ROWS, C), 1) & (ROWS - 1)
    # Column j of each block, copied into all of the block's columns.
    picked = jnp.concatenate([jnp.where(lane == j, tile, 0.0) for j in range(ROWS - 1)], axis=1)
    ones = jnp.broadcast_to(jnp.where(same, 1.0, 0.0), (G, C, C))
    copies = mm(picked, ones, jax.lax.Precision.HIGHEST)
    row = jax.lax.broadcasted_iota(jnp.int32, (ROWS, C), 0)
    X = jnp.broadcast_to(jnp.where(row == lane, 1.0, 0.0), (G, ROWS, C))
    for j in range(ROWS - 1):
        X = X - copies[:, j * ROWS : (j + 1) * ROWS] * X[:, j : j + 1]
    return jnp.where(same, jnp.concatenate([X] * (C // ROWS), axis=1), 0.0)


def columns(rows: jax.Array) -> jax.Array:
    """`[G, C]`, one row for each head, to `[G, C, 1]`."""
    turned = rows.T
    return jnp.stack([turned[:, h : h + 1] for h in range(rows.shape[0])])


def to_rows(columns: jax.Array) -> jax.Array:
    """`[G, C, 1]` to `[G, C]`."""
    return jnp.concatenate([columns[h] for h in range(columns.shape[0])], axis=1).T


def scaled(x: jax.Array, factor: jax.Array | float | None) -> jax.Array:
    """`factor * x` in float32."""
    x = x.astype(jnp.float32)
    return x if factor is None else factor * x


def read(x: jax.Array, factor: jax.Array | None, y: jax.Array, precision: Precision) -> jax.Array:
    """`(factor * x) y`; a factor without channels multiplies the product."""
    if factor is None or factor.shape[-1] == 1:
        return scaled(mm(x, y, precision), factor)
    return _left_accurate(mm, factor * x, y, precision)


def write(x: jax.Array, factor: jax.Array | None, y: jax.Array, precision: Precision) -> jax.Array:
    """`(factor * x)^T y`, y rounded to the dtype of x; a factor without channels multiplies y."""
    if factor is None or factor.shape[-1] == 1:
        return mm_tn(x, scaled(y, factor).astype(x.dtype), precision)
    return _left_accurate(mm_tn, factor * x, y.astype(x.dtype), precision)


def _left_accurate(product: Product, x: jax.Array, y: jax.Array, precision: Precision) -> jax.Array:
    """`product(x, y)` of a float32 `x`, as a split bfloat16 pair where `y` has 16 bits."""
    if precision is not None:
        return product(x, y, precision)
    high, low = _halves(x)
    return product(high, y, None) + product(low, y, None)


def rolled(x: jax.Array, rows: int) -> jax.Array:
    """Every row moved down by `rows`, the last ones to the top; `[N, 8, K]`."""
    moved: jax.Array = pltpu.roll(x, rows, 1)
    return moved
