"""The pieces of a split sequence, one after another; heads and columns of V in parallel.

`S` enters a piece and `S'` the next one, or `G` leaves a piece and `G'` the one before it::

    S' = M S + R        G' = M^T G + H

As in `run_states`, `S^T` has one column of V to a row, so that it is the left operand of the next
product straight from registers. Products of split pairs (three of them) keep 16 bits of mantissa.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu.blocks import lanes, launches, mma, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.pipeline import Ring, unravel
from deltanet_jax.kernels.mosaic_gpu.program import WIDTH

__all__ = ["chain_pieces"]

STAGES = 3  # maps in shared memory, 192 KiB at K = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch; a thread block has WIDTH columns of one head."""

    pieces: int
    heads: int  # value heads
    slices: int  # of the columns of V
    reverse: bool
    interpret: bool


class Inputs(NamedTuple):
    """Arrays that the kernel reads."""

    first: Ref
    high: Ref
    low: Ref
    offsets: Ref


def _body(plan: Plan, refs: Inputs, entering: Ref, tiles: tuple[Ref, Ref], loaded: Ref) -> None:
    batch, head, part = unravel(lax.axis_index("program"), plan.heads, plan.slices)
    columns, ring = pl.ds(part * WIDTH, WIDTH), Ring(STAGES, loaded)
    last = plan.pieces - 1  # of the order of the walk; its map is not read

    def place(i: Index) -> tuple[Index, Index]:
        return batch * plan.pieces + (last - i if plan.reverse else i), head

    def load(i: Index) -> None:
        stage = ring.stage(i)
        for source, tile in zip((refs.high, refs.low), tiles, strict=True):
            stage.load(source.at[place(i)], tile.at[stage.index])

    def store(i: Index, state: jax.Array) -> None:
        target = entering.at[(*place(i), slice(None), columns)]
        smem.store_f32_transposed(target, state, interpret=plan.interpret)

    def step(i: Index, state: jax.Array) -> jax.Array:
        added = refs.offsets.at[(*place(i), slice(None), columns)]
        added = smem.load_f32_transposed(added, interpret=plan.interpret)
        store(i, state)
        left = lanes.halves(state, interpret=plan.interpret)
        stage = ring.stage(i)
        stage.wait()
        right = [x.at[stage.index] for x in tiles]
        if not plan.reverse:
            right = [smem.transposed(x) for x in right]
        pairs = mma.of_halves(left, right)
        (state,) = mma.accumulate((added, pairs), interpret=plan.interpret)
        # Every warp has read the map before another takes its place.
        plgpu.commit_smem()
        pl.when(i + STAGES < last)(lambda: load(i + STAGES))
        return state

    for i in range(min(STAGES, last)):
        load(i)
    start = refs.first.at[batch, head, :, columns]
    state = smem.load_f32_transposed(start, interpret=plan.interpret)
    store(last, lax.fori_loop(0, last, step, state))


def chain_pieces(
    first: jax.Array,
    maps: tuple[jax.Array, ...],
    offsets: jax.Array,
    pieces: int,
    *,
    reverse: bool,
    interpret: object = None,
) -> jax.Array:
    """Return the state that enters every piece, from that of the first (the last if `reverse`).

    Args:
        first: `[B, HV, K, V]` float32, K up to 128.
        maps: The split (high, low) pair of `M` of every piece, each `[B * P, HV, K, K]` bfloat16.
        offsets: `R`, or `H` if `reverse`, of every piece, `[B * P, HV, K, V]` float32, or more
            columns, of which the first V are read.
        pieces: P.
        reverse: Whether state gradients go from the last piece to the first.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `[B * P, HV, K, V]` float32.
    """
    batch, heads, key_dim, value_dim = first.shape
    plan = Plan(
        pieces=pieces,
        heads=heads,
        slices=value_dim // WIDTH,
        reverse=reverse,
        interpret=interpret is not None,
    )
    tile = smem.tile(STAGES, key_dim, key_dim, dtype=jnp.bfloat16)
    high, low = maps
    out: Ref = jax.ShapeDtypeStruct((*offsets.shape[:3], value_dim), jnp.float32)
    entering: jax.Array = launches.launch(
        "chain_pieces",
        functools.partial(_body, plan),
        Inputs(first, high, low, offsets),
        out,
        (tile, tile),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        programs=batch * heads * plan.slices,
        interpret=interpret,
    )
    return entering
