"""The arrays that the kernels read and write, in their layout, and the blocks of one program.

`BH` and `BHV` are batch and heads as one axis: value head n reads key head n // (HV // H) there
too. A program's index is (cell of heads, chunk); the chunks of one cell run in order.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deltanet_jax.kernels.mosaic_tpu.plan import Plan

__all__ = ["Inputs", "Saved", "Specs", "join_rows", "like", "split_rows", "varies", "vary_alike"]


class Inputs(NamedTuple):
    """One problem, padded to whole chunks, heads before time; `None` where it has no such part."""

    q: jax.Array  # [BH, T, K]
    k: jax.Array  # [BH, T, K]
    v: jax.Array  # [BHV, T, V]
    beta: jax.Array | None  # [cells, N, G, C]
    coarse: jax.Array | None  # [cells, N, G, C]; the cumulative log-decay is coarse + fine
    fine: jax.Array | None


class Saved(NamedTuple):
    """What the forward kernel keeps for the backward kernel."""

    states: jax.Array  # [BHV, N, K, V], at the start of each chunk, dtype of q
    inverse: jax.Array | None  # [BHV, N, C, C], (I + L)^-1, float32


class Specs:
    """Block specifications; `chunk_of` maps the grid's last index to a chunk."""

    def __init__(self, plan: Plan, K: int, V: int, chunk_of: Callable[[jax.Array], jax.Array]):
        G, C = plan.heads, plan.chunk

        def key_cell(cell: jax.Array) -> jax.Array:
            cells = plan.group // plan.heads
            return jax.lax.div(cell, cells) if cells > 1 else cell

        keys = plan.key_heads
        self.keys = pl.BlockSpec((keys, C, K), lambda c, n: (key_cell(c), chunk_of(n), 0))
        self.key_grads = pl.BlockSpec((keys, C, K), lambda c, n: (c, chunk_of(n), 0))
        self.values = pl.BlockSpec((G, C, V), lambda c, n: (c, chunk_of(n), 0))
        self.rows = pl.BlockSpec((None, None, G, C), lambda c, n: (c, chunk_of(n), 0, 0))
        self.state = pl.BlockSpec((G, K, V), lambda c, n: (c, 0, 0))
        self.states = pl.BlockSpec((G, None, K, V), lambda c, n: (c, chunk_of(n), 0, 0))
        self.inverse = pl.BlockSpec((G, None, C, C), lambda c, n: (c, chunk_of(n), 0, 0))

    def inputs(self, x: Inputs) -> Inputs:
        rows = [None if part is None else self.rows for part in (x.beta, x.coarse, x.fine)]
        return Inputs(self.keys, self.keys, self.values, *rows)

    def saved(self, plan: Plan) -> Saved:
        return Saved(self.states, self.inverse if plan.delta else None)


def like(x: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """The type of an output that varies over the same `shard_map` axes as `x`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).mat)


def split_rows(x: jax.Array, plan: Plan) -> jax.Array:
    """`[BHV, T]` to `[cells, N, G, C]`: a program's vectors as one tile."""
    BHV, T = x.shape
    x = x.reshape(BHV // plan.heads, plan.heads, T // plan.chunk, plan.chunk)
    return jnp.swapaxes(x, 1, 2)


def join_rows(x: jax.Array) -> jax.Array:
    """Undo `split_rows`."""
    cells, N, G, C = x.shape
    return jnp.swapaxes(x, 1, 2).reshape(cells * G, N * C)


def varies(*arrays: jax.Array) -> bool:
    """Whether one of the arrays is typed as varying over an axis of `shard_map`."""
    return any(jax.typeof(x).mat.varying for x in arrays)


def vary_alike(*arrays: jax.Array | None) -> list[jax.Array | None]:
    """The arrays, typed as varying over every `shard_map` axis that one of them varies over."""
    present = [x for x in arrays if x is not None]
    axes = frozenset[str]().union(*(jax.typeof(x).mat.varying for x in present))

    def vary(x: jax.Array | None) -> jax.Array | None:
        missing = () if x is None else tuple(sorted(axes - jax.typeof(x).mat.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return [vary(x) for x in arrays]
