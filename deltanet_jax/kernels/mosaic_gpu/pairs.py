"""Products of all pairs of tokens of a chunk, decayed by a scalar gate."""

import jax
import jax.numpy as jnp

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, mma, smem

__all__ = ["decayed", "overlaps", "pair_decay", "scores"]


def pair_decay(tile) -> jax.Array:
    """`D_ij = exp(b_i - b_j)` of the pairs of a chunk; above the diagonal it may overflow."""
    shape = (CHUNK, CHUNK)
    gap = smem.over_rows(smem.row(tile["b"]), shape) - smem.over_columns(
        smem.column(tile["b_column"]), shape
    )
    return jnp.exp(gap)


def decayed(plan, tile, x: jax.Array) -> jax.Array:
    """`D * x` of the pairs of a chunk; above the diagonal anything, not even finite."""
    return x * pair_decay(tile) if plan.gated else x


def overlaps(tile, name: str, meanwhile=None) -> jax.Array:
    """`x k^T` of a chunk, `x` by name; `meanwhile` is overlapped with the product."""
    pair = tile[name], smem.transposed(tile["k"])
    return mma.products(((CHUNK, CHUNK), (pair,)), meanwhile=meanwhile)[0]


def scores(plan, tile) -> jax.Array:
    """`tril(D * (q k^T))` of a chunk."""
    return lanes.masked(decayed(plan, tile, overlaps(tile, "q")), interpret=plan.interpret)
