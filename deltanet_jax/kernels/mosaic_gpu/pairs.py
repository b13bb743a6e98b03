"""Products of all pairs of tokens of a chunk, decayed by a scalar gate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, mma, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Ref

__all__ = ["decayed", "overlaps", "pair_decay", "scores"]


def pair_decay(b: Ref, b_column: Ref) -> jax.Array:
    """`D_ij = exp(b_i - b_j)` of the pairs of a chunk; above the diagonal it may overflow."""
    shape = (CHUNK, CHUNK)
    gap = smem.over_rows(smem.row(b), shape) - smem.over_columns(smem.column(b_column), shape)
    return jnp.exp(gap)


def decayed(x: jax.Array, b: Ref, b_column: Ref) -> jax.Array:
    """`D * x` of the pairs of a chunk; above the diagonal anything, not even finite."""
    return x if b is None else x * pair_decay(b, b_column)


def overlaps(x: Ref, k: Ref, meanwhile: Callable[[], None] | None = None) -> jax.Array:
    """`x k^T` of a chunk; `meanwhile` is overlapped with the product."""
    pair = x, smem.transposed(k)
    return mma.products(((CHUNK, CHUNK), (pair,)), meanwhile=meanwhile)[0]


def scores(q: Ref, k: Ref, b: Ref, b_column: Ref, *, interpret: bool) -> jax.Array:
    """`tril(D * (q k^T))` of a chunk."""
    return lanes.masked(decayed(overlaps(q, k), b, b_column), interpret=interpret)
