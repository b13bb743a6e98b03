"""The operands of every chunk, decayed by a vector gate, all chunks in parallel.

Rows of one chunk, `P(x, y)_ij = x_i Diag(exp(b_i - b_j)) y_j^T`::

    queries = exp(b) q        keys = exp(b) k        writes = exp(b_C - b) k        kept = exp(b_C)
    scores = tril(P(q, k))    M = stril(P(k, k))     T = (I + M beta_j)^-1

With these the recurrent kernels see no gate but `kept`, which multiplies the rows of the state. The
decay climbs `channel_decay`, 32 channels at a time.

All products are of single warps. Of tokens in different blocks of 16, the warp of the later block
computes the scores and that of the earlier one, which would have nothing to do, the overlaps,
transposed. The warpgroups of a thread block share nothing: each walks over chunks of its own, and
loads the next channels while it decays these.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import chunk_inverses
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, channel_decay, launches, smem, warp
from deltanet_jax.kernels.mosaic_gpu.blocks.lanes import BLOCK
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.pipeline import unravel
from deltanet_jax.kernels.mosaic_gpu.chunk_inverses import InverseTiles
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.tuning import config_of, sm_count

__all__ = ["SLICE", "SWIZZLE", "DecayedChunks", "decayed_chunks", "types_of"]

SLICE = 32  # channels at a time
SWIZZLE = 2 * SLICE  # bytes: a slice is one tile of its array
HALF = CHUNK // 2
Place = tuple[Index, ...]  # batch, chunk and head
# By size, what `i ^ j` has in common for a block of 16 tokens i and the one of the tokens j.
DISTANCES = {16: (16,), 32: (32, 48)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch, with the walk of each warpgroup over the chunks."""

    shape: Shape
    interpret: bool
    save: bool  # what the backward needs

    @property
    def items(self) -> int:
        return self.shape.batch * self.shape.chunks * self.shape.heads

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a thread block, which is alone on its SM."""
        return config_of("decayed_chunks", self.shape).warpgroups

    @property
    def programs(self) -> int:
        return min(sm_count(), pl.cdiv(self.items, self.warpgroups))

    @property
    def rounds(self) -> int:
        return pl.cdiv(self.items, self.programs * self.warpgroups)

    @property
    def slices(self) -> int:
        return self.shape.key_dim // SLICE


class Inputs(NamedTuple):
    """Arrays that the kernel reads."""

    q: Ref
    k: Ref
    g: Ref
    beta: Ref  # `None` without the delta rule


class DecayedChunks(NamedTuple):
    """Operands of every chunk, decayed; `None` where the kernel was not to make them.

    Without a vector gate there is the inverse alone.
    """

    queries: Ref = None  # [B, T, HV, K]
    writes: Ref = None  # [B, T, HV, K]
    scores: Ref = None  # [B, N, HV, C, C]
    kept: Ref = None  # [B, N, HV, K] float32
    keys: Ref = None  # [B, T, HV, K]; with the delta rule
    inverse: Ref = None  # [B, N, HV, C, C]; with the delta rule
    overlaps: Ref = None  # `M`, [B, N, HV, C, C]; with the delta rule and a backward


class Scratch(NamedTuple):
    """Shared memory of a warpgroup, with the tiles of `InverseTiles`."""

    below_high: Ref
    below_low: Ref
    blocks: Ref
    high: Ref
    left: Ref
    low: Ref
    right: Ref
    q: Ref
    k: Ref
    g: Ref
    kept: Ref
    queries: Ref
    writes: Ref
    keys: Ref
    spare: Ref
    exchange: Ref
    others: Ref
    beta: Ref

    @property
    def inverse(self) -> InverseTiles:
        """The tiles of the inverse, which come first."""
        return InverseTiles(*self[: len(InverseTiles._fields)])


class Loaded(NamedTuple):
    """Barriers of loads."""

    keys: Ref
    beta: Ref


class Panels(NamedTuple):
    """Sums over channels of products within and between blocks of 16 tokens, `[C, 16]`."""

    scores: jax.Array  # within
    overlaps: jax.Array | None
    between: dict[int, jax.Array]  # by distance; of overlaps in the rows of the earlier block


def types_of(shape: Shape, *, save: bool) -> DecayedChunks:
    """Return the types of the results; `save` asks for those that only the backward reads."""
    array = jax.ShapeDtypeStruct
    chunk = shape.batch, shape.chunks, shape.heads
    keys = array((shape.batch, shape.tokens, shape.heads, shape.key_dim), shape.dtype)
    pairs = array((*chunk, CHUNK, CHUNK), shape.dtype)
    return DecayedChunks(
        queries=keys,
        writes=keys,
        scores=pairs,
        kept=array((*chunk, shape.key_dim), jnp.float32),
        keys=keys if shape.delta else None,
        inverse=pairs if shape.delta else None,
        overlaps=pairs if shape.delta and save else None,
    )


def _scratch(plan: Plan) -> Scratch:
    """Return the shared memory, all of it once for every warpgroup."""
    count, delta = plan.warpgroups, plan.shape.delta
    keys = smem.tile(count, CHUNK, SLICE, dtype=plan.shape.dtype, swizzle=SWIZZLE)
    exchange = warp.exchange_shape(SLICE, uniform=True)
    inverse = InverseTiles(*[None] * len(InverseTiles._fields))
    if delta:
        inverse = chunk_inverses.inverse_tiles(plan.shape.dtype, count)
    return Scratch(
        *inverse,
        q=keys,
        k=keys,
        g=smem.tile(count, CHUNK, SLICE, dtype=jnp.float32),
        kept=plgpu.SMEM((count, SLICE), jnp.float32),
        queries=keys,
        writes=keys,
        keys=keys if delta else None,
        spare=keys if delta and plan.save else None,
        exchange=plgpu.SMEM((count, *exchange), jnp.float32),
        others=plgpu.SMEM((count, *warp.other_rows_shape(SLICE)), jnp.int32),
        beta=plgpu.SMEM((count, CHUNK), jnp.float32) if delta else None,
    )


def _within(plan: Plan, panel: jax.Array, x: jax.Array, y: jax.Array, size: int) -> jax.Array:
    """Add the pairs of one size within blocks of 16 to `[C, 16]`."""
    product = warp.block_products(x, y, interpret=plan.interpret)
    return jnp.where(channel_decay.pairs(size, BLOCK), panel + product, panel)


def _between(
    plan: Plan,
    tiles: Scratch,
    sums: dict[int, jax.Array],
    queries: jax.Array,
    keys: jax.Array,
    size: int,
) -> dict[int, jax.Array]:
    """Add the pairs of one size from 16."""
    own = queries
    if plan.shape.delta:
        own = warp.odd_rows(queries, keys, size, interpret=plan.interpret)
    distances = DISTANCES[size]
    others = warp.other_rows(keys, distances, tiles.others, interpret=plan.interpret)
    return sums | {
        distance: warp.block_products(own, other, sums[distance], interpret=plan.interpret)
        for distance, other in zip(distances, others, strict=True)
    }


def _decay(
    plan: Plan, tiles: Scratch, q: jax.Array, k: jax.Array, a: jax.Array, panels: Panels
) -> tuple[DecayedChunks, Panels]:
    """Decay 32 channels, whose gates are `a`; return them, and `panels` plus their share."""
    exchange = functools.partial(
        warp.exchanged, scratch=tiles.exchange, uniform=True, interpret=plan.interpret
    )

    def low(x: jax.Array) -> jax.Array:
        return x.astype(plan.shape.dtype)

    blocks = channel_decay.single(a)
    scores, overlaps, between = panels
    scores = _within(plan, scores, low(q), low(k), 0)
    for size in channel_decay.SIZES:
        queries, keys = low(q * blocks.factor), low(k * blocks.factor)
        if size in channel_decay.BETWEEN:
            between = _between(plan, tiles, between, queries, keys, size)
        else:
            scores = _within(plan, scores, queries, keys, size)
            if overlaps is not None:
                overlaps = _within(plan, overlaps, keys, keys, size)
        blocks = channel_decay.doubled(blocks, size, exchange)
    made = DecayedChunks(
        queries=low(q * blocks.from_start),
        writes=low(k * blocks.to_end),
        kept=blocks.block,
        keys=low(k * blocks.from_start) if plan.shape.delta else None,
    )
    return made, Panels(scores, overlaps, between)


def _whole(within: jax.Array, between: dict[int, jax.Array]) -> jax.Array:
    """The chunk of all these blocks."""
    row = plgpu.broadcasted_iota(jnp.int32, within.shape, 0, layout=smem.MATRIX)
    row_block = lax.div(row, BLOCK)
    columns = []
    for column in range(CHUNK // BLOCK):
        total = jnp.where(row_block == column, within, 0.0)
        for distance, x in between.items():
            later = column ^ distance // BLOCK
            if later > column:
                total = jnp.where(row_block == later, x, total)
        columns.append(total)
    return jnp.concatenate(columns, axis=1)


def _overlaps(
    plan: Plan, tiles: Scratch, within: jax.Array, others: dict[int, jax.Array]
) -> jax.Array:
    between = {}
    for distance, x in others.items():
        between[distance] = warp.other_triangle(
            x, distance, tiles.blocks.at[:, pl.ds(0, BLOCK)], interpret=plan.interpret
        )
        plgpu.commit_smem()
    return _whole(within, between)


def _store_pairs(halves: tuple[Ref, Ref], target: Ref, x: jax.Array) -> None:
    """Store the pairs of tokens of a chunk through two tiles, of half of the columns each."""
    for at, tile in enumerate(halves):
        tile[...] = x[:, at * HALF : (at + 1) * HALF].astype(target.dtype)
    plgpu.commit_smem()
    for at, tile in enumerate(halves):
        plgpu.copy_smem_to_gmem(tile, target.at[:, pl.ds(at * HALF, HALF)])


def _finish(
    plan: Plan, out: DecayedChunks, tiles: Scratch, loaded: Loaded, place: Place, panels: Panels
) -> None:
    """Store the pairs of tokens, and the inverse."""
    _settle()
    scores = _whole(panels.scores, panels.between)
    _store_pairs((tiles.queries, tiles.writes), out.scores.at[place], scores)
    if panels.overlaps is None:
        return
    overlaps = _overlaps(plan, tiles, panels.overlaps, panels.between)
    if plan.save:
        _store_pairs((tiles.keys, tiles.spare), out.overlaps.at[place], overlaps)
    plgpu.barrier_wait(loaded.beta)
    x = overlaps * smem.over_columns(-smem.column(tiles.beta), (CHUNK, CHUNK))
    halves = chunk_inverses.store_inverse(
        x, tiles.inverse, dtype=plan.shape.dtype, interpret=plan.interpret
    )
    plgpu.commit_smem()
    chunk_inverses.copy_inverse(halves, out.inverse.at[place])


def _settle() -> None:
    """Wait until the stores have read their tiles."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _body(
    plan: Plan, refs: Inputs, out: DecayedChunks, every: Scratch, loaded: Loaded, left: Ref
) -> None:
    role, program = lax.axis_index("role"), lax.axis_index("program")
    loaded = launches.at(loaded, lambda: role)

    def own_tiles() -> Scratch:
        return launches.at(every, lambda: lax.axis_index("role"))

    tiles = own_tiles()

    def place_of(i: Index) -> Place:
        # Where nothing is left a warpgroup repeats the last chunk.
        item = jnp.minimum((i * plan.programs + program) * plan.warpgroups + role, plan.items - 1)
        return unravel(item, plan.shape.chunks, plan.shape.heads)

    def keys_at(place: Place, at: Index) -> tuple[Index, Any, Index, Any]:
        batch, chunk, head = place
        return batch, pl.ds(chunk * CHUNK, CHUNK), head, pl.ds(at * SLICE, SLICE)

    def load(step: Index) -> None:
        own = keys_at(place_of(lax.div(step, plan.slices)), lax.rem(step, plan.slices))
        batch, tokens, head, channels = own
        shared = batch, tokens, lax.div(head, plan.shape.group), channels
        plgpu.copy_gmem_to_smem(refs.g.at[own], tiles.g, loaded.keys)
        plgpu.copy_gmem_to_smem(refs.q.at[shared], tiles.q, loaded.keys)
        plgpu.copy_gmem_to_smem(refs.k.at[shared], tiles.k, loaded.keys)

    def part(i: Index, place: Place, at: Index, panels: Panels) -> Panels:
        plgpu.barrier_wait(loaded.keys)
        a = jnp.exp(smem.load(tiles.g, smem.MATRIX))
        q, k = (smem.matrix(x) for x in (tiles.q, tiles.k))
        # All warps have read the tiles, which are then filled again.
        plgpu.commit_smem()
        following = i * plan.slices + at + 1
        pl.when(following < plan.rounds * plan.slices)(lambda: load(following))
        made, panels = _decay(plan, tiles, q, k, a, panels)
        _settle()
        leave = [
            (made.queries, tiles.queries, out.queries),
            (made.writes, tiles.writes, out.writes),
        ]
        if plan.shape.delta:
            leave += [(made.keys, tiles.keys, out.keys)]
        for x, tile, _ in leave:
            tile[...] = x
        warp.store_row(tiles.kept, made.kept, interpret=plan.interpret)
        plgpu.commit_smem()
        own = keys_at(place, at)
        for _, tile, target in leave:
            plgpu.copy_smem_to_gmem(tile, target.at[own])
        plgpu.copy_smem_to_gmem(tiles.kept, out.kept.at[(*place, own[-1])])
        return panels

    def chunk(i: Index, _: None) -> None:
        place = place_of(i)
        if plan.shape.delta:
            plgpu.copy_gmem_to_smem(refs.beta.at[place], tiles.beta, loaded.beta)
        zero = jnp.zeros((CHUNK, BLOCK), jnp.float32)
        between = {x: zero for distances in DISTANCES.values() for x in distances}
        panels = Panels(zero, zero if plan.shape.delta else None, between)
        panels = lax.fori_loop(0, plan.slices, functools.partial(part, i, place), panels)
        # Recomputed: see `lanes.zero`.
        _finish(plan, out, own_tiles(), loaded, place, panels)

    load(0)
    lax.fori_loop(0, plan.rounds, chunk, None)
    plgpu.wait_smem_to_gmem(0)
    # No warpgroup leaves while another multiplies.
    plgpu.barrier_arrive(left)
    plgpu.barrier_wait(left)


def decayed_chunks(
    shape: Shape,
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array | None,
    *,
    save: bool,
    interpret: object = None,
) -> DecayedChunks:
    """The chunks' operands, decayed.

    Args:
        shape: Sizes and variant of the call.
        q: `[B, T, H, K]` with T a multiple of 64, in 16 bits.
        k: The same shape.
        g: Log-decay, `[B, T, HV, K]` float32; -inf forgets.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        save: Whether to return `overlaps`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The operands.
    """
    plan = Plan(shape=shape, save=save, interpret=interpret is not None)
    count = plan.warpgroups
    loaded = Loaded(
        keys=plgpu.Barrier(num_arrivals=3, num_barriers=count),
        beta=plgpu.Barrier(num_barriers=count) if shape.delta else None,
    )
    return launches.launch(
        "decayed_chunks",
        functools.partial(_body, plan),
        Inputs(q, k, g, beta),
        types_of(shape, save=save),
        _scratch(plan),
        loaded,
        plgpu.Barrier(num_arrivals=count),
        programs=plan.programs,
        warpgroups=count,
        interpret=interpret,
    )
