"""The arrays that the kernels read and write, in their layout, and the blocks of one program.

A program's index is (batch, cell of heads, chunk); chunks of one cell run in order.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deltanet_jax.kernels.mosaic_tpu.plan import Plan

__all__ = ["Inputs", "Saved", "Specs", "join_rows", "like", "split_rows", "vary_alike"]


class Inputs(NamedTuple):
    """One problem, padded to whole chunks, heads before time; `None` where it has no such part."""

    q: jax.Array  # [B, H, T, K]
    k: jax.Array  # [B, H, T, K]
    v: jax.Array  # [B, HV, T, V]
    beta: jax.Array | None  # [B, cells, N, G, C]
    coarse: jax.Array | None  # [B, cells, N, G, C]; the cumulative log-decay is coarse + fine
    fine: jax.Array | None


class Saved(NamedTuple):
    """What the forward kernel keeps for the backward kernel, in the dtype of the inputs."""

    states: jax.Array  # [B, HV, N, K, V], at the start of each chunk
    inverse: jax.Array | None  # [B, HV, N, C, C], (I + L)^-1


class Specs:
    """Block specifications; `chunk_of` maps the grid's last index to a chunk."""

    def __init__(self, plan: Plan, K: int, V: int, chunk_of: Callable[[jax.Array], jax.Array]):
        G, C = plan.heads, plan.chunk

        def key_cell(cell: jax.Array) -> jax.Array:
            cells = plan.group // plan.heads
            return jax.lax.div(cell, cells) if cells > 1 else cell

        keys = plan.key_heads
        self.keys = pl.BlockSpec(
            (None, keys, C, K), lambda b, c, n: (b, key_cell(c), chunk_of(n), 0)
        )
        self.key_grads = pl.BlockSpec((None, keys, C, K), lambda b, c, n: (b, c, chunk_of(n), 0))
        self.values = pl.BlockSpec((None, G, C, V), lambda b, c, n: (b, c, chunk_of(n), 0))
        self.rows = pl.BlockSpec(
            (None, None, None, G, C), lambda b, c, n: (b, c, chunk_of(n), 0, 0)
        )
        self.state = pl.BlockSpec((None, G, K, V), lambda b, c, n: (b, c, 0, 0))
        self.states = pl.BlockSpec((None, G, None, K, V), lambda b, c, n: (b, c, chunk_of(n), 0, 0))
        self.inverse = pl.BlockSpec(
            (None, G, None, C, C), lambda b, c, n: (b, c, chunk_of(n), 0, 0)
        )

    def inputs(self, x: Inputs) -> Inputs:
        rows = [None if part is None else self.rows for part in (x.beta, x.coarse, x.fine)]
        return Inputs(self.keys, self.keys, self.values, *rows)

    def saved(self, plan: Plan) -> Saved:
        return Saved(self.states, self.inverse if plan.delta else None)


def like(x: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """The type of an output that varies over the same `shard_map` axes as `x`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).mat)


def split_rows(x: jax.Array, plan: Plan) -> jax.Array:
    """`[B, HV, T]` to `[B, cells, N, G, C]`: a program's vectors as one tile."""
    B, HV, T = x.shape
    x = x.reshape(B, HV // plan.heads, plan.heads, T // plan.chunk, plan.chunk)
    return jnp.swapaxes(x, 2, 3)


def join_rows(x: jax.Array) -> jax.Array:
    """Undo `split_rows`."""
    B, cells, N, G, C = x.shape
    return jnp.swapaxes(x, 2, 3).reshape(B, cells * G, N * C)


def vary_alike(*arrays: jax.Array | None) -> list[jax.Array | None]:
    """The arrays, typed as varying over every `shard_map` axis that one of them varies over."""
    present = [x for x in arrays if x is not None]
    axes = frozenset[str]().union(*(jax.typeof(x).mat.varying for x in present))

    def vary(x: jax.Array | None) -> jax.Array | None:
        missing = () if x is None else tuple(sorted(axes - jax.typeof(x).mat.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return [vary(x) for x in arrays]
