"""The arrays that the kernels read and write, in their layout, and the blocks of one program.

`BH` and `BHV` are batch and heads as one axis: value head n reads key head n // (HV // H) there
too. A program's index is (cell of heads, chunk); the chunks of one cell run in order.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deltanet_jax.kernels.mosaic_tpu.plan import Plan

__all__ = ["Inputs", "Saved", "Specs", "join_rows", "split_rows"]


# What a record of arrays holds: arrays, their types, or their block specifications.
A = TypeVar("A")


class Inputs(NamedTuple, Generic[A]):
    """One problem, padded to whole chunks, heads before time; `None` where it has no such part."""

    q: A  # [BH, T, K]
    k: A  # [BH, T, K]
    v: A  # [BHV, T, V]
    beta: A | None  # [cells, N, G, C]
    coarse: A | None  # [cells, N, G, C]; the cumulative log-decay is coarse + fine
    fine: A | None


class Saved(NamedTuple, Generic[A]):
    """What the forward kernel keeps for the backward kernel."""

    states: A  # [cells, N, G, K, V], at the start of each chunk, dtype of q
    inverse: A | None  # [cells, N, G, C, C], (I + L)^-1, float32


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
        self.states = pl.BlockSpec((None, None, G, K, V), lambda c, n: (c, chunk_of(n), 0, 0, 0))
        self.inverse = pl.BlockSpec((None, None, G, C, C), lambda c, n: (c, chunk_of(n), 0, 0, 0))

    def inputs(self, x: Inputs[jax.Array]) -> Inputs[pl.BlockSpec]:
        rows = [None if part is None else self.rows for part in (x.beta, x.coarse, x.fine)]
        return Inputs(self.keys, self.keys, self.values, *rows)

    def saved(self, plan: Plan) -> Saved[pl.BlockSpec]:
        return Saved(self.states, self.inverse if plan.delta else None)


def split_rows(x: jax.Array, plan: Plan) -> jax.Array:
    """`[BHV, T]` to `[cells, N, G, C]`: a program's vectors as one tile."""
    BHV, T = x.shape
    x = x.reshape(BHV // plan.heads, plan.heads, T // plan.chunk, plan.chunk)
    return jnp.swapaxes(x, 1, 2)


def join_rows(x: jax.Array) -> jax.Array:
    """Undo `split_rows`."""
    cells, N, G, C = x.shape
    return jnp.swapaxes(x, 1, 2).reshape(cells * G, N * C)
