"""The decay between tokens of a chunk, for a vector gate.

Blocks of 1, 2, 4, ... tokens are numbered from 0. Tokens j < i are in neighbouring blocks, an odd
one and the even one before it, of exactly one size; at the boundary between these blocks the decay
of the pair factors into two, so that `P(x, y)_ij = x_i Diag(exp(b_i - b_j)) y_j^T` is one masked
product of decayed rows for each size. The factors come from `a = exp(g)` by products alone:
nothing is subtracted, no factor is above 1, what underflows is 0 and a reset is exact.

All arrays are `[C, S]`, some channels of one chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.lanes import BLOCK

__all__ = [
    "BETWEEN",
    "SIZES",
    "WITHIN",
    "Blocks",
    "Sums",
    "doubled",
    "gate_gradient",
    "pairs",
    "single",
    "transposed",
]

SIZES = tuple(1 << level for level in range(CHUNK.bit_length() - 1))
WITHIN = tuple(size for size in SIZES if size < BLOCK)  # one warp's rows hold the pairs
BETWEEN = tuple(size for size in SIZES if size >= BLOCK)

Exchange = Callable[[jax.Array, int], jax.Array]  # row i ^ size in the place of row i


class Blocks(NamedTuple):
    """Decay over parts of the blocks of one size; row `i` belongs to token `i`."""

    factor: jax.Array  # between the token and the boundary: through it if odd, after it if even
    rest: jax.Array  # of the block: after it if odd, through it if even
    block: jax.Array  # over the block

    @property
    def from_start(self) -> jax.Array:
        """Through the token, where the block is the chunk: number 0, so even."""
        return self.rest

    @property
    def to_end(self) -> jax.Array:
        """After the token, where the block is the chunk."""
        return self.factor


class Sums(NamedTuple):
    """Gradients of the logarithms of the decay over parts of the blocks of one size."""

    through: jax.Array  # from the block's first token through this one
    after: jax.Array  # from after this token to the block's end
    block: jax.Array  # over the block

    @property
    def g(self) -> jax.Array:
        """The gradient of the gate, from that of blocks of one token."""
        return self.through + self.block


def _odd(shape: tuple[int, ...], size: int) -> jax.Array:
    row: jax.Array = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=smem.MATRIX)
    return (row & size) != 0


def pairs(size: int, width: int = CHUNK) -> jax.Array:
    """Mask pairs with i in an odd block of `size` and j in the even one before it; i = j for 0.

    `[C, C]`, or `[C, 16]` with the tokens j of i's own 16.
    """
    i: jax.Array
    j: jax.Array
    i, j = (
        plgpu.broadcasted_iota(jnp.int32, (CHUNK, width), axis, layout=smem.MATRIX)
        for axis in (0, 1)
    )
    i = i & (width - 1)
    if size == 0:
        return i == j
    return (((i ^ j) & -size) == size) & (i > j)


def single(a: jax.Array) -> Blocks:
    """Blocks of one token."""
    odd = _odd(a.shape, 1)
    return Blocks(jnp.where(odd, a, 1.0), jnp.where(odd, 1.0, a), a)


def doubled(x: Blocks, size: int, exchange: Exchange) -> Blocks:
    """Double the blocks from `size` to `2 size`: only `factor` reaches into the other block."""
    other = exchange(x.block, size)
    grown = x.factor * other
    same = _odd(grown.shape, size) == _odd(grown.shape, 2 * size)
    return Blocks(jnp.where(same, grown, x.rest), jnp.where(same, x.rest, grown), x.block * other)


def transposed(x: Sums, size: int, level: jax.Array | None, exchange: Exchange) -> Sums:
    """Map gradients over blocks of `2 size` to those over blocks of `size`.

    `level` is the gradient of the logarithm of this size's factor.
    """
    odd = _odd(x.block.shape, size)
    other = jnp.where(odd, x.through, x.after) + x.block
    block = x.block + exchange(other, size)
    if level is None:
        return Sums(x.through, x.after, block)
    through, after = _shared(level, size)
    return Sums(x.through + through, x.after + after, block)


def gate_gradient(size: int, level: jax.Array, exchange: Exchange) -> jax.Array:
    """The gradient of the gate from that of the logarithm of one size's factor."""
    x = Sums(*_shared(level, size), jnp.zeros_like(level))
    while size > 1:
        size //= 2
        x = transposed(x, size, None, exchange)
    return x.g


def _shared(level: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Split a factor into the shares that `through` (odd blocks) and `after` (even ones) get."""
    odd = _odd(level.shape, size)
    return jnp.where(odd, level, 0.0), jnp.where(odd, 0.0, level)
