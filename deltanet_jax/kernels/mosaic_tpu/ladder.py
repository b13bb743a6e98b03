"""Sums of a vector gate over blocks of 1, 2, 4, ... tokens, and their transpose.

Blocks of one size are numbered from 0; an odd one and the even one before it make a block of
twice the size. All arrays are `[G, C, K]`, `C` a power of two. Sums only add, so that no digit
is lost beside a huge gate.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deltanet_jax.kernels.mosaic_tpu import tile

__all__ = ["Sums", "pairs", "sums", "transposed_end", "transposed_step"]


class Sums(NamedTuple):
    """Sums for each token over its block of one size; or the gradients of these sums."""

    through: jax.Array  # from the block's first token through this one
    after: jax.Array  # from the next token through the block's last
    block: jax.Array  # the whole block

    @property
    def g(self) -> jax.Array:
        """The gradient of the gate, from that of blocks of one token."""
        return self.through + self.block


def pairs(rows: jax.Array, cols: jax.Array, size: int) -> jax.Array:
    """Mask: the row's token is in an odd block of `size` and the column's in the one before."""
    return (((rows ^ cols) & -size) == size) & (rows > cols)


def sums(g: jax.Array) -> tuple[list[jax.Array], Sums]:
    """Sums of `g` to the boundary between an odd block and the one before, and over the chunk.

    Returns:
        For each size 1, 2, ..., C / 2: in odd blocks the sum from the boundary through the
        token, in even blocks that from the next token to the boundary.
    """
    level = Sums(g, jnp.zeros_like(g), g)
    exponents = []
    size = 1
    while size < g.shape[1]:
        odd = _odd(g.shape, size)
        exponents.append(jnp.where(odd, level.through, level.after))
        other = _exchanged(level.block, size)
        level = Sums(
            jnp.where(odd, level.through + other, level.through),
            jnp.where(odd, level.after, level.after + other),
            level.block + other,
        )
        size *= 2
    return exponents, level


def transposed_end(through: jax.Array, after: jax.Array, total: jax.Array) -> Sums:
    """The gradients of the sums over the chunk; `total`, `[G, K, 1]`, is that of all of it."""
    first = jax.lax.broadcasted_iota(jnp.int32, through.shape, 1) == 0
    rows = tile.to_rows(total)[:, None, :]
    return Sums(through, after, jnp.where(first, rows, 0.0))


def transposed_step(d: Sums, size: int, d_exponents: jax.Array) -> Sums:
    """Map gradients of the sums over blocks of `2 size` to those over blocks of `size`."""
    odd = _odd(d.block.shape, size)
    other = jnp.where(odd, d.through, d.after) + d.block
    return Sums(
        jnp.where(odd, d.through + d_exponents, d.through),
        jnp.where(odd, d.after, d.after + d_exponents),
        d.block + _exchanged(other, size),
    )


def _odd(shape: tuple[int, ...], size: int) -> jax.Array:
    return (jax.lax.broadcasted_iota(jnp.int32, shape, 1) & size) != 0


def _exchanged(x: jax.Array, size: int) -> jax.Array:
    """Exchange every odd block of `size` rows with the even one before it."""
    G, C, K = x.shape
    if size >= tile.ROWS:
        x = x.reshape(G, C // (2 * size), 2, size, K)
        return jnp.concatenate([x[:, :, 1:], x[:, :, :1]], axis=2).reshape(G, C, K)
    x = x.reshape(G * C // tile.ROWS, tile.ROWS, K)
    up, down = tile.rolled(x, tile.ROWS - size), tile.rolled(x, size)
    return jnp.where(_odd(x.shape, size), down, up).reshape(G, C, K)
