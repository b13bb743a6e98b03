"""What a gate per key channel turns every chunk into, all chunks in parallel.

Rows of one chunk, `P(x, y)_ij = x_i Diag(exp(b_i - b_j)) y_j^T`::

    queries = exp(b) q        keys = exp(b) k        writes = exp(b_C - b) k        kept = exp(b_C)
    scores = tril(P(q, k))    M = stril(P(k, k))     T = (I + M beta_j)^-1

With these the serial kernels see no gate but `kept`, which multiplies the rows of the state. The
decay climbs `ladder`; a program does 32 channels at a time.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import ladder, prep, tiles, warp
from deltanet_jax.kernels.mosaic_gpu.lanes import BLOCK

__all__ = ["SLICE", "SWIZZLE", "decayed_chunks"]

CHUNK = tiles.CHUNK
WIDTH = 64  # channels in shared memory
SLICE = 32  # channels in registers
SWIZZLE = 2 * SLICE  # bytes: a slice is one tile of its array
SQUARE = (CHUNK, CHUNK)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch; a program is one chunk of one head."""

    batch: int
    chunks: int
    heads: int  # value heads
    group: int  # value heads per key head
    key_dim: int
    dtype: jnp.dtype
    delta: bool
    save: bool  # what the backward needs
    interpret: bool

    @property
    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = jax.ShapeDtypeStruct
        chunk = (self.batch, self.chunks, self.heads)
        keys = shape((self.batch, self.chunks * CHUNK, self.heads, self.key_dim), self.dtype)
        pair = shape((*chunk, CHUNK, CHUNK), self.dtype)
        outputs = {"queries": keys, "writes": keys, "scores": pair}
        outputs |= {"kept": shape((*chunk, self.key_dim), jnp.float32)}
        if self.delta:
            outputs |= {"keys": keys, "inverse": pair}
            outputs |= {"overlaps": pair} if self.save else {}
        return outputs


def _scratch(plan: Plan) -> dict:
    keys = tiles.tile(CHUNK, WIDTH, dtype=plan.dtype, swizzle=SWIZZLE)
    buffers = dict.fromkeys(("q", "k", "writes", *_level_tiles()), keys)
    buffers |= {"g": tiles.tile(CHUNK, WIDTH, dtype=jnp.float32)}
    buffers |= {"exchange": plgpu.SMEM(warp.exchange_shape(SLICE, uniform=True), jnp.float32)}
    buffers |= {"kept": plgpu.SMEM((WIDTH,), jnp.float32)}
    if plan.delta:
        buffers |= {"beta": plgpu.SMEM((CHUNK,), jnp.float32)}
        buffers |= prep.inverse_buffers(plan.dtype)
    return buffers


def _level_tiles() -> list[str]:
    return [f"{x}{size}" for size in ladder.BETWEEN for x in "qk"]


def _plus_pairs(plan: Plan, panel: jax.Array, x: jax.Array, y: jax.Array, size: int) -> jax.Array:
    """Adds the pairs of one size within blocks of 16 to `[C, 16]`."""
    x, y = x.astype(plan.dtype), y.astype(plan.dtype)
    product = warp.block_products(x, y, interpret=plan.interpret)
    return jnp.where(ladder.pairs(size, BLOCK), panel + product, panel)


def _slice(plan: Plan, buffers, at, panels):
    """Decays 32 channels of the tiles.

    Returns `panels` plus the slice's share of the pairs of tokens within blocks of 16.
    """
    channels = slice(None), pl.ds(at, SLICE)
    exchange = functools.partial(
        warp.exchanged, scratch=buffers["exchange"], uniform=True, interpret=plan.interpret
    )

    def keep(name, x):
        buffers[name].at[channels][...] = x.astype(plan.dtype)

    q, k = (tiles.matrix(buffers[x].at[channels]) for x in "qk")
    blocks = ladder.single(jnp.exp(plgpu.load(buffers["g"].at[channels], layout=tiles.MATRIX)))
    scores, overlaps = panels
    scores = _plus_pairs(plan, scores, q, k, 0)
    for size in ladder.SIZES:
        queries, keys = q * blocks.factor, k * blocks.factor
        if size in ladder.BETWEEN:
            keep(f"q{size}", queries)
            keep(f"k{size}", keys)
        else:
            scores = _plus_pairs(plan, scores, queries, keys, size)
            if plan.delta:
                overlaps = _plus_pairs(plan, overlaps, keys, keys, size)
        blocks = ladder.doubled(blocks, size, exchange)
    keep("q", q * blocks.from_start)
    if plan.delta:
        keep("k", k * blocks.from_start)
    keep("writes", k * blocks.to_end)
    warp.store_row(buffers["kept"].at[pl.ds(at, SLICE)], blocks.block, interpret=plan.interpret)
    return scores, overlaps


def _between(buffers, x: str) -> jax.Array:
    """The products of the pairs of tokens in different blocks of 16."""
    operands = [
        (SQUARE, [(buffers[f"{x}{size}"], tiles.transposed(buffers[f"k{size}"]))])
        for size in ladder.BETWEEN
    ]
    results = zip(ladder.BETWEEN, tiles.products(*operands), strict=True)
    return sum(jnp.where(ladder.pairs(size), product, 0.0) for size, product in results)


def _whole(panel: jax.Array, between: jax.Array) -> jax.Array:
    """The chunk whose blocks on the diagonal are those of the panel."""
    i, j = (plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=tiles.MATRIX) for axis in (0, 1))
    spread = jnp.concatenate([panel] * (CHUNK // BLOCK), axis=1)
    return between + jnp.where((i ^ j) < BLOCK, spread, 0.0)


def _finish(plan: Plan, refs, buffers, place, scores, overlaps) -> None:
    """Stores the pairs of tokens, and the inverse."""
    names = {"scores": "q16"}
    buffers["q16"][...] = scores.astype(plan.dtype)
    if plan.delta:
        if plan.save:
            buffers["q32"][...] = overlaps.astype(plan.dtype)
            names |= {"overlaps": "q32"}
        x = overlaps * tiles.over_columns(tiles.column(buffers["beta"]), SQUARE)
        halves = prep.store_inverse(x, buffers, dtype=plan.dtype, interpret=plan.interpret)
    plgpu.commit_smem()
    if plan.delta:
        prep.copy_inverse(halves, refs["inverse"].at[place])
    for name, tile in names.items():
        plgpu.copy_smem_to_gmem(buffers[tile], refs[name].at[place])
    plgpu.wait_smem_to_gmem(0)


def _body(plan: Plan, names, *args):
    *refs, buffers, loaded = args
    refs = dict(zip(names, refs, strict=True))
    item = lax.axis_index("program")
    head, item = lax.rem(item, plan.heads), lax.div(item, plan.heads)
    batch, chunk = lax.div(item, plan.chunks), lax.rem(item, plan.chunks)
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    place = batch, chunk, head
    if plan.delta:
        plgpu.copy_gmem_to_smem(refs["beta"].at[place], buffers["beta"], loaded["beta"])
        plgpu.barrier_wait(loaded["beta"])

    def part(at, sums):
        scores, overlaps, *panels = sums
        channels = pl.ds(at * WIDTH, WIDTH)
        shared = batch, tokens, lax.div(head, plan.group), channels
        own = batch, tokens, head, channels
        for name, place in (("q", shared), ("k", shared), ("g", own)):
            plgpu.copy_gmem_to_smem(refs[name].at[place], buffers[name], loaded["keys"])
        plgpu.barrier_wait(loaded["keys"])

        def step(i, panels):
            return _slice(plan, buffers, pl.multiple_of(i * SLICE, SLICE), panels)

        panels = lax.fori_loop(0, WIDTH // SLICE, step, tuple(panels))
        plgpu.commit_smem()
        targets = {"queries": "q", "writes": "writes"} | ({"keys": "k"} if plan.delta else {})
        for name, tile in targets.items():
            plgpu.copy_smem_to_gmem(buffers[tile], refs[name].at[own])
        kept = refs["kept"].at[batch, chunk, head, channels]
        plgpu.copy_smem_to_gmem(buffers["kept"], kept)
        scores += _between(buffers, "q")
        if plan.delta:
            overlaps += _between(buffers, "k")
        # The tiles are filled again: by the next loads, or by what `_finish` stores.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return scores, overlaps, *panels

    square, panel = (jnp.zeros((CHUNK, width), jnp.float32) for width in (CHUNK, BLOCK))
    scores, overlaps, *panels = lax.fori_loop(
        0, plan.key_dim // WIDTH, part, (square, square, panel, panel)
    )
    scores = _whole(panels[0], scores)
    overlaps = _whole(panels[1], overlaps) if plan.delta else None
    _finish(plan, refs, buffers, place, scores, overlaps)


def decayed_chunks(q, k, g, beta, *, save, interpret=None):
    """The chunks' operands, decayed.

    Args:
        q: `[B, T, H, K]` with T a multiple of 64, in 16 bits.
        k: The same shape.
        g: Log-decay, `[B, T, HV, K]` float32; -inf forgets.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        save: Whether to return `overlaps`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        A dictionary: `queries` and `writes` `[B, T, HV, K]`, `scores` `[B, N, HV, C, C]` in the
        dtype of `k`, and `kept` `[B, N, HV, K]` float32; with the delta rule also `keys`
        `[B, T, HV, K]`, the `inverse` and, if saved, the `overlaps` `M`, `[B, N, HV, C, C]`.
    """
    batch, tokens, key_heads, key_dim = q.shape
    heads = g.shape[2]
    plan = Plan(
        batch, tokens // CHUNK, heads, heads // key_heads, key_dim, q.dtype,
        beta is not None, save, interpret is not None,
    )  # fmt: skip
    inputs = {"q": q, "k": k, "g": g} | ({} if beta is None else {"beta": beta})
    barriers = {"keys": plgpu.Barrier(num_arrivals=3)}
    if plan.delta:
        barriers |= {"beta": plgpu.Barrier()}
    names = (*inputs, *plan.outputs)
    kernel = plgpu.kernel(
        tiles.named("decayed_chunks", functools.partial(_body, plan, names)),
        out_type=tuple(plan.outputs.values()),
        scratch_types=(_scratch(plan), barriers),
        grid=(plan.batch * plan.chunks * plan.heads,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return dict(zip(plan.outputs, kernel(*inputs.values()), strict=True))
