"""Products of all pairs of tokens of a chunk, decayed by a scalar gate."""

import jax
import jax.numpy as jnp

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, mma, smem
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["decayed", "overlaps", "pair_decay", "scores"]


def pair_decay(tile) -> jax.Array:
    """`D_ij = exp(b_i - b_j)` of the pairs of a chunk; above the diagonal it may overflow."""
    shape = (CHUNK, CHUNK)
    gap = smem.over_rows(smem.row(tile["b"]), shape) - smem.over_columns(
        smem.column(tile["b_column"]), shape
    )
    return jnp.exp(gap)


def decayed(shape: Shape, tile, x: jax.Array) -> jax.Array:
    """`D * x` of the pairs of a chunk; above the diagonal anything, not even finite."""
    return x * pair_decay(tile) if shape.scalar_gate else x


def overlaps(tile, name: str, meanwhile=None) -> jax.Array:
    """`x k^T` of a chunk, `x` by name; `meanwhile` is overlapped with the product."""
    pair = tile[name], smem.transposed(tile["k"])
    return mma.products(((CHUNK, CHUNK), (pair,)), meanwhile=meanwhile)[0]


def scores(shape: Shape, tile, *, interpret: bool) -> jax.Array:
    """`tril(D * (q k^T))` of a chunk."""
    return lanes.masked(decayed(shape, tile, overlaps(tile, "q")), interpret=interpret)
