"""The arrays that the kernels read and write, in their layout, and the blocks of a grid cell.

Batch and heads are one axis, `BH` or `BHV`: value head n reads key head n // (HV // H) there
too. The grid index is (cell of heads, chunk); the chunks of one cell run in order. A grid cell
reads and writes one contiguous piece of each array.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deltanet_jax.kernels.mosaic_tpu.plan import Plan

__all__ = ["Inputs", "Saved", "Specs", "join", "split"]


# What a record of arrays holds: arrays, their types, or their block specifications.
A = TypeVar("A")


class Inputs(NamedTuple, Generic[A]):
    """One problem, padded to whole chunks; `None` where it has no such part.

    Cells of key heads are as large as a grid cell needs: one head where several cells read it.
    """

    q: A  # [key cells, N, heads, C, K]
    k: A  # [key cells, N, heads, C, K]
    v: A  # [cells, N, G, C, V]
    beta: A | None  # [cells, N, G, C]
    # Nothing; or for a scalar gate two shares of its cumulative sum, [cells, N, G, C]; or for
    # a vector gate the gate, [cells, N, G, C, K].
    gate: tuple[A, ...]


class Saved(NamedTuple, Generic[A]):
    """Residuals of the forward kernel for the backward kernel."""

    states: A  # [cells, N, G, K, V], at the start of each chunk, dtype of q
    inverse: A | None  # [cells, N, G, C, C], (I + L)^-1, float32


class Specs:
    """Block specifications; `chunk_of` maps the grid's last index to a chunk."""

    def __init__(self, plan: Plan, K: int, V: int, chunk_of: Callable[[jax.Array], jax.Array]):
        G, C = plan.heads, plan.chunk

        def key_cell(cell: jax.Array) -> jax.Array:
            cells = plan.group // plan.heads
            return jax.lax.div(cell, cells) if cells > 1 else cell

        def own(*tile: int) -> pl.BlockSpec:
            zeros = (0,) * len(tile)
            return pl.BlockSpec((None, None, *tile), lambda c, n: (c, chunk_of(n), *zeros))

        keys = (plan.key_heads, C, K)
        self.keys = pl.BlockSpec(
            (None, None, *keys), lambda c, n: (key_cell(c), chunk_of(n), 0, 0, 0)
        )
        self.key_grads, self.values = own(*keys), own(G, C, V)
        self.rows, self.channels = own(G, C), own(G, C, K)
        self.states, self.inverse = own(G, K, V), own(G, C, C)
        self.state = pl.BlockSpec((G, K, V), lambda c, n: (c, 0, 0))

    def inputs(self, x: Inputs[jax.Array]) -> Inputs[pl.BlockSpec]:
        beta = None if x.beta is None else self.rows
        gate = tuple(self.channels if part.ndim == 5 else self.rows for part in x.gate)
        return Inputs(self.keys, self.keys, self.values, beta, gate)

    def saved(self, plan: Plan) -> Saved[pl.BlockSpec]:
        return Saved(self.states, self.inverse if plan.delta else None)


def split(x: jax.Array, heads: int, chunk: int) -> jax.Array:
    """`[BH, T, ...]` to `[cells, N, heads, C, ...]`: the tokens of a grid cell as one piece."""
    BH, T, *rest = x.shape
    return jnp.swapaxes(x.reshape(BH // heads, heads, T // chunk, chunk, *rest), 1, 2)


def join(x: jax.Array) -> jax.Array:
    """Undo `split`."""
    cells, N, heads, C, *rest = x.shape
    return jnp.swapaxes(x, 1, 2).reshape(cells * heads, N * C, *rest)
