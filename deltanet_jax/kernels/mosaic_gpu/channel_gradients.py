"""The gradients of q, k and a vector gate, from those of the chunks' operands.

With the decayed rows `q' = f q`, `k' = f k` of one block size of `channel_decay`, `f` its factor,
and the pairs of that size of the gradients `A = dscores` and `M = doverlaps`::

    dq' = A k'        dk' = A^T q' + M k' + M^T k'
    dq += f dq'       dk += f dk'        dlog f = q' * dq' + k' * dk'

Of a pair of tokens one has the row and the other the column; both products come from the same
16-bit tiles, so that they cancel in the gradient of every gate outside of the pair. The
gradients of `log f` then climb down the ladder.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu.blocks import (
    CHUNK,
    channel_decay,
    lanes,
    launches,
    mma,
    smem,
    warp,
)
from deltanet_jax.kernels.mosaic_gpu.blocks.lanes import BLOCK
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.pipeline import unravel
from deltanet_jax.kernels.mosaic_gpu.decayed_chunks import SLICE, SWIZZLE, DecayedChunks
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["ChannelGradients", "channel_gradients"]

KEYS = (CHUNK, SLICE)
SQUARE = (CHUNK, CHUNK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch; a thread block has one chunk of one head."""

    shape: Shape
    interpret: bool


class Inputs(NamedTuple):
    """Arrays that the kernel reads."""

    q: Ref
    k: Ref
    g: Ref
    kept: Ref  # this and the following are gradients
    queries: Ref
    writes: Ref
    keys: Ref  # `None` without the delta rule
    scores: Ref
    overlaps: Ref  # `None` without the delta rule


class ChannelGradients(NamedTuple):
    """Gradients of q, k and g, `[B, T, HV, K]`; one for each value head."""

    dq: Ref
    dk: Ref
    dg: Ref  # float32


class Scratch(NamedTuple):
    """Shared memory of a thread block; a tuple has a tile for each of `channel_decay.BETWEEN`."""

    q: Ref
    k: Ref
    g: Ref
    dg: Ref
    kept: Ref  # this and the following three are gradients
    queries: Ref
    writes: Ref
    keys: Ref
    q_levels: tuple[Ref, ...]
    k_levels: tuple[Ref, ...]
    scores: tuple[Ref, ...]
    overlaps: tuple[Ref, ...] | None
    exchange: Ref
    exchange_up: Ref

    @property
    def pairs(self) -> tuple[tuple[Ref, ...], ...]:
        """The gradients of pairs of tokens."""
        return (self.scores,) if self.overlaps is None else (self.scores, self.overlaps)


class Loaded(NamedTuple):
    """Barriers of loads."""

    pairs: Ref
    keys: Ref
    cotangents: Ref


def _scratch(plan: Plan) -> tuple[Scratch, Loaded]:
    delta, levels = plan.shape.delta, len(channel_decay.BETWEEN)
    # Of one place: see `lanes.zero`.
    keys = smem.tile(1, *KEYS, dtype=plan.shape.dtype, swizzle=SWIZZLE)
    square = smem.tile(1, *SQUARE, dtype=plan.shape.dtype, swizzle=SWIZZLE)
    gate = smem.tile(1, *KEYS, dtype=jnp.float32)
    up, down = (
        plgpu.SMEM((1, *warp.exchange_shape(SLICE, uniform=uniform)), jnp.float32)
        for uniform in (True, False)
    )
    tiles = Scratch(
        q=keys,
        k=keys,
        g=gate,
        dg=gate,
        kept=plgpu.SMEM((1, SLICE), jnp.float32),
        queries=keys,
        writes=keys,
        keys=keys if delta else None,
        q_levels=(keys,) * levels,
        k_levels=(keys,) * levels,
        scores=(square,) * levels,
        overlaps=(square,) * levels if delta else None,
        exchange=down,
        exchange_up=up,
    )
    loaded = Loaded(
        pairs=plgpu.Barrier(num_arrivals=2 if delta else 1),
        keys=plgpu.Barrier(num_arrivals=4),
        cotangents=plgpu.Barrier(num_arrivals=3 if delta else 2),
    )
    return tiles, loaded


def _cut_pairs(plan: Plan, levels: tuple[Ref, ...]) -> jax.Array:
    """Make a tile of the pairs of each size between blocks of 16; return those within.

    The gradients of all pairs arrive in the tile of the smallest of these sizes.
    """
    x = smem.matrix(levels[0])
    row_block = lax.div(
        plgpu.broadcasted_iota(jnp.int32, (CHUNK, BLOCK), 0, layout=smem.MATRIX), BLOCK
    )
    within = jnp.zeros((CHUNK, BLOCK), jnp.float32)
    for block in range(CHUNK // BLOCK):
        columns = x[:, block * BLOCK : (block + 1) * BLOCK]
        within = jnp.where(row_block == block, columns, within)
    for size, level in zip(channel_decay.BETWEEN, levels, strict=True):
        share = jnp.where(channel_decay.pairs(size), x, 0.0)
        level[...] = share.astype(plan.shape.dtype)
    return within


def _level_within(
    plan: Plan, panels: list[jax.Array], size: int, queries: jax.Array, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`dq'` and `dk'` of one size below 16."""
    mask = channel_decay.pairs(size, BLOCK)
    scores, *overlaps = (jnp.where(mask, x, 0.0).astype(plan.shape.dtype) for x in panels)
    terms = [(scores, queries, True)]
    for x in overlaps:
        terms += [(x, keys, False), (x, keys, True)]
    apply = functools.partial(warp.apply_blocks, interpret=plan.interpret)
    return apply((scores, keys, False)), apply(*terms)


def _level_between(
    tiles: Scratch, size: int, queries: jax.Array, keys: jax.Array
) -> list[jax.Array]:
    """`dq'` and `dk'` of one size from 16."""
    level = channel_decay.BETWEEN.index(size)
    q, k = tiles.q_levels[level], tiles.k_levels[level]
    q[...] = queries
    k[...] = keys
    plgpu.commit_smem()
    scores, *overlaps = (levels[level] for levels in tiles.pairs)
    pairs = [(smem.transposed(scores), q)]
    for x in overlaps:
        pairs += [(x, k), (smem.transposed(x), k)]
    return mma.products((KEYS, [(scores, k)]), (KEYS, pairs))


def _ends(
    plan: Plan,
    tiles: Scratch,
    q: jax.Array,
    k: jax.Array,
    blocks: channel_decay.Blocks,
    dq: jax.Array,
    dk: jax.Array,
) -> tuple[jax.Array, jax.Array, channel_decay.Sums]:
    """Differentiate the operands that meet states; return gradients of the whole chunk's sums."""
    through, after = blocks.from_start, blocks.to_end

    def rounded(x: jax.Array) -> jax.Array:
        return lanes.widened(x.astype(plan.shape.dtype), interpret=plan.interpret)

    own = (tiles.queries, tiles.writes, *([tiles.keys] if plan.shape.delta else []))
    d_queries, d_writes, *d_keys = (smem.matrix(x) for x in own)
    d_through = rounded(through * q) * d_queries
    dq += through * d_queries
    dk += after * d_writes
    for x in d_keys:
        d_through += rounded(through * k) * x
        dk += through * x
    d_kept = smem.over_columns(smem.column(tiles.kept), KEYS)
    first = plgpu.broadcasted_iota(jnp.int32, KEYS, 0, layout=smem.MATRIX) == 0
    d_block = jnp.where(first, blocks.block * d_kept, 0.0)
    return dq, dk, channel_decay.Sums(d_through, rounded(after * k) * d_writes, d_block)


def _slice(
    plan: Plan,
    tiles: Scratch,
    panels: list[jax.Array],
    diagonal: jax.Array,
    wait_cotangents: Callable[[], None],
    load_next: Callable[[], None],
) -> ChannelGradients:
    """The gradients of 32 channels of q, k and g.

    Calls `wait_cotangents` before those gradients are read, and `load_next` when nothing reads q,
    k and g any more.
    """
    exchange = functools.partial(warp.exchanged, interpret=plan.interpret)
    up = functools.partial(exchange, scratch=tiles.exchange_up, uniform=True)
    down = functools.partial(exchange, scratch=tiles.exchange, uniform=False)

    def load() -> Iterator[jax.Array]:
        # In 16 bits these take half of the registers between their uses.
        return (smem.matrix(x) for x in (tiles.q, tiles.k))

    def wide(x: jax.Array) -> jax.Array:
        return lanes.widened(x, interpret=plan.interpret)

    blocks = channel_decay.single(jnp.exp(smem.load(tiles.g, smem.MATRIX)))
    q, k = load()
    dq, dk, dg = diagonal * k, diagonal * q, jnp.zeros(KEYS, jnp.float32)
    levels: dict[int, jax.Array] = {}
    for size in channel_decay.SIZES:
        factor = blocks.factor
        q, k = load()
        queries, keys = (factor * q).astype(plan.shape.dtype), (factor * k).astype(plan.shape.dtype)
        if size in channel_decay.WITHIN:
            d_queries, d_keys = _level_within(plan, panels, size, queries, keys)
        else:
            d_queries, d_keys = _level_between(tiles, size, queries, keys)
        dq += factor * d_queries
        dk += factor * d_keys
        level = wide(queries) * d_queries + wide(keys) * d_keys
        if size in channel_decay.WITHIN[:-1]:
            # Sooner than on the way down, when all of these would be waiting in registers.
            dg += channel_decay.gate_gradient(size, level, down)
        elif size in channel_decay.WITHIN:
            # The longest way; this one waits in the tile of its result.
            tiles.dg[...] = level
        else:
            levels[size] = level
        blocks = channel_decay.doubled(blocks, size, up)
    wait_cotangents()
    q, k = load()
    dq, dk, d = _ends(plan, tiles, q, k, blocks, dq, dk)
    plgpu.commit_smem()
    load_next()
    for size in reversed(channel_decay.SIZES):
        share = levels.get(size)
        if size == channel_decay.WITHIN[-1]:
            share = smem.load(tiles.dg, smem.MATRIX)
        d = channel_decay.transposed(d, size, share, down)
    return ChannelGradients(dq.astype(plan.shape.dtype), dk.astype(plan.shape.dtype), dg + d.g)


class _Chunk(NamedTuple):
    """Position of the chunk of a thread block."""

    batch: Index
    chunk: Index
    head: Index

    def channels(self, at: Index, head: Index | None = None) -> tuple[Any, ...]:
        """32 channels of the tokens, of another head if given."""
        tokens = pl.ds(self.chunk * CHUNK, CHUNK)
        return self.batch, tokens, self.head if head is None else head, pl.ds(at * SLICE, SLICE)


def _load_keys(
    plan: Plan, refs: Inputs, tiles: Scratch, loaded: Loaded, own: _Chunk, at: Index
) -> None:
    """Issue the loads of 32 channels that come first."""
    shared = own.channels(at, lax.div(own.head, plan.shape.group))
    plgpu.copy_gmem_to_smem(refs.g.at[own.channels(at)], tiles.g, loaded.keys)
    plgpu.copy_gmem_to_smem(refs.q.at[shared], tiles.q, loaded.keys)
    plgpu.copy_gmem_to_smem(refs.k.at[shared], tiles.k, loaded.keys)
    plgpu.copy_gmem_to_smem(refs.kept.at[(*own, shared[-1])], tiles.kept, loaded.keys)


def _panels(
    plan: Plan, refs: Inputs, tiles: Scratch, loaded: Loaded, own: _Chunk
) -> list[jax.Array]:
    """Load the gradients of pairs, and make the tiles of those between blocks of 16."""
    for source, levels in zip((refs.scores, refs.overlaps), tiles.pairs, strict=False):
        plgpu.copy_gmem_to_smem(source.at[tuple(own)], levels[0], loaded.pairs)
    plgpu.barrier_wait(loaded.pairs)
    return [_cut_pairs(plan, levels) for levels in tiles.pairs]


def _body(plan: Plan, refs: Inputs, out: ChannelGradients, every: Scratch, loaded: Loaded) -> None:
    own = _Chunk(*unravel(lax.axis_index("program"), plan.shape.chunks, plan.shape.heads))

    def placed() -> Scratch:
        zero = lanes.zero(interpret=plan.interpret)
        return launches.at(every, lambda: zero)

    def step(at: Index, _: None) -> None:
        tiles = placed()
        # The gradients of q and k leave through tiles that were read.
        leave = ChannelGradients(tiles.queries, tiles.writes, tiles.dg)

        def load_next() -> None:
            load = functools.partial(_load_keys, plan, refs, tiles, loaded, own)
            pl.when((at + 1) * SLICE < plan.shape.key_dim)(lambda: load(at + 1))

        def wait_cotangents() -> None:
            plgpu.barrier_wait(loaded.cotangents)

        plgpu.barrier_wait(loaded.keys)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sources = (refs.queries, refs.writes, refs.keys)
        for source, tile in zip(sources, (tiles.queries, tiles.writes, tiles.keys), strict=True):
            if source is not None:
                plgpu.copy_gmem_to_smem(source.at[own.channels(at)], tile, loaded.cotangents)
        gradients = _slice(plan, tiles, panels, diagonal, wait_cotangents, load_next)
        for tile, x in zip(leave, gradients, strict=True):
            tile[...] = x
        plgpu.commit_smem()
        for tile, target in zip(leave, out, strict=True):
            plgpu.copy_smem_to_gmem(tile, target.at[own.channels(at)])

    first = placed()
    _load_keys(plan, refs, first, loaded, own, 0)
    panels = _panels(plan, refs, first, loaded, own)
    diagonal = jnp.where(channel_decay.pairs(0, BLOCK), panels[0], 0.0).sum(axis=1)
    diagonal = smem.over_rows(diagonal, KEYS)
    lax.fori_loop(0, plan.shape.key_dim // SLICE, step, None)
    plgpu.wait_smem_to_gmem(0)


def channel_gradients(
    shape: Shape,
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    cotangents: DecayedChunks,
    *,
    interpret: object = None,
) -> ChannelGradients:
    """`dq`, `dk` and `dg` of all chunks.

    Args:
        shape: Sizes and variant of the call.
        q: `[B, T, H, K]` with T a multiple of 64, in 16 bits.
        k: The same shape.
        g: Log-decay, `[B, T, HV, K]` float32; -inf forgets.
        cotangents: Gradients of the results of `decayed_chunks`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The gradients, those of q and k in their dtype.
    """
    plan = Plan(shape=shape, interpret=interpret is not None)
    d, array = cotangents, jax.ShapeDtypeStruct
    keys = array(g.shape, shape.dtype)
    return launches.launch(
        "channel_gradients",
        functools.partial(_body, plan),
        Inputs(q, k, g, d.kept, d.queries, d.writes, d.keys, d.scores, d.overlaps),
        ChannelGradients(keys, keys, array(g.shape, jnp.float32)),
        *_scratch(plan),
        programs=shape.batch * shape.chunks * shape.heads,
        interpret=interpret,
    )
