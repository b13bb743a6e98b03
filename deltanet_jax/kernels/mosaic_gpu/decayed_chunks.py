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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import chunk_inverses
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, channel_decay, launches, smem, warp
from deltanet_jax.kernels.mosaic_gpu.blocks.lanes import BLOCK
from deltanet_jax.kernels.mosaic_gpu.chunk_plan import decayed_shapes
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.tuning import sm_count

__all__ = ["SLICE", "SWIZZLE", "decayed_chunks"]

SLICE = 32  # channels at a time
SWIZZLE = 2 * SLICE  # bytes: a slice is one tile of its array
HALF = CHUNK // 2
# By size, what `i ^ j` has in common for a block of 16 tokens i and the one of the tokens j.
DISTANCES = {16: (16,), 32: (32, 48)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch, with the walk of each warpgroup over the chunks."""

    shape: Shape
    interpret: bool
    save: bool  # what the backward needs

    @property
    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        outputs = decayed_shapes(self.shape)
        pair = outputs["scores"]
        if self.shape.delta:
            outputs |= {"inverse": pair} | ({"overlaps": pair} if self.save else {})
        return outputs

    @property
    def pairs(self) -> dict[str, tuple[str, str]]:
        """Tiles through which the left and right columns of pairs of tokens leave."""
        saved = self.shape.delta and self.save
        return {"scores": ("queries", "writes")} | (
            {"overlaps": ("keys", "spare")} if saved else {}
        )

    @property
    def items(self) -> int:
        return self.shape.batch * self.shape.chunks * self.shape.heads

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a thread block, which is alone on its SM."""
        # A thread of three has 168 registers, of two 255. The overlaps and the inverse need more
        # than 168: at (8, 4096, 16, 128) three spilled over 400 bytes and took 0.637 ms on an
        # H200 where two took 0.484; two take 0.402, or less, since the inverse needs less.
        # Without them three spill 8 bytes and take 0.257.
        return 2 if self.shape.delta else 3

    @property
    def programs(self) -> int:
        return min(sm_count(), pl.cdiv(self.items, self.warpgroups))

    @property
    def rounds(self) -> int:
        return pl.cdiv(self.items, self.programs * self.warpgroups)

    @property
    def slices(self) -> int:
        return self.shape.key_dim // SLICE


class Panels(NamedTuple):
    """Sums over channels of products within and between blocks of 16 tokens, `[C, 16]`."""

    scores: jax.Array  # within
    overlaps: jax.Array | None
    between: dict[int, jax.Array]  # by distance; of overlaps in the rows of the earlier block


def _scratch(plan: Plan) -> dict:
    """Buffers by name, one of each for every warpgroup."""
    keys = smem.tile(CHUNK, SLICE, dtype=plan.shape.dtype, swizzle=SWIZZLE)
    names = {"q", "k", "queries", "writes"} | {x for pair in plan.pairs.values() for x in pair}
    buffers = dict.fromkeys(sorted(names | {"keys"} if plan.shape.delta else names), keys)
    buffers |= {"g": smem.tile(CHUNK, SLICE, dtype=jnp.float32)}
    buffers |= {"kept": plgpu.SMEM((SLICE,), jnp.float32)}
    exchange = warp.exchange_shape(SLICE, uniform=True)
    buffers |= {"exchange": plgpu.SMEM(exchange, jnp.float32)}
    buffers |= {"others": plgpu.SMEM(warp.other_rows_shape(SLICE), jnp.int32)}
    if plan.shape.delta:
        buffers |= chunk_inverses.inverse_buffers(plan.shape.dtype)
        buffers |= {"beta": plgpu.SMEM((CHUNK,), jnp.float32)}
    return {
        name: plgpu.SMEM((plan.warpgroups, *x.shape), x.dtype, transforms=x.transforms)
        for name, x in buffers.items()
    }


def _within(plan: Plan, panel: jax.Array, x: jax.Array, y: jax.Array, size: int) -> jax.Array:
    """Add the pairs of one size within blocks of 16 to `[C, 16]`."""
    product = warp.block_products(x, y, interpret=plan.interpret)
    return jnp.where(channel_decay.pairs(size, BLOCK), panel + product, panel)


def _between(plan: Plan, buffers, sums, queries, keys, size: int) -> dict[int, jax.Array]:
    """Add the pairs of one size from 16."""
    own = queries
    if plan.shape.delta:
        own = warp.odd_rows(queries, keys, size, interpret=plan.interpret)
    distances = DISTANCES[size]
    others = warp.other_rows(keys, distances, buffers["others"], interpret=plan.interpret)
    return sums | {
        distance: warp.block_products(own, other, sums[distance], interpret=plan.interpret)
        for distance, other in zip(distances, others, strict=True)
    }


def _decay(plan: Plan, buffers, q, k, a, panels: Panels):
    """Decay 32 channels, whose gates are `a`.

    Returns what `decayed_chunks` stores of them by name, and `panels` plus their share.
    """
    exchange = functools.partial(
        warp.exchanged, scratch=buffers["exchange"], uniform=True, interpret=plan.interpret
    )

    def low(x):
        return x.astype(plan.shape.dtype)

    blocks = channel_decay.single(a)
    scores, overlaps, between = panels
    scores = _within(plan, scores, low(q), low(k), 0)
    for size in channel_decay.SIZES:
        queries, keys = low(q * blocks.factor), low(k * blocks.factor)
        if size in channel_decay.BETWEEN:
            between = _between(plan, buffers, between, queries, keys, size)
        else:
            scores = _within(plan, scores, queries, keys, size)
            if plan.shape.delta:
                overlaps = _within(plan, overlaps, keys, keys, size)
        blocks = channel_decay.doubled(blocks, size, exchange)
    made = {"queries": low(q * blocks.from_start), "writes": low(k * blocks.to_end)}
    if plan.shape.delta:
        made |= {"keys": low(k * blocks.from_start)}
    return made | {"kept": blocks.block}, Panels(scores, overlaps, between)


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


def _overlaps(plan: Plan, buffers, panels: Panels) -> jax.Array:
    between = {}
    for distance, x in panels.between.items():
        between[distance] = warp.other_triangle(
            x, distance, buffers["blocks"].at[:, pl.ds(0, BLOCK)], interpret=plan.interpret
        )
        plgpu.commit_smem()
    return _whole(panels.overlaps, between)


def _store_pairs(plan: Plan, refs, buffers, place, name: str, x: jax.Array) -> None:
    halves = plan.pairs[name]
    for at, tile in enumerate(halves):
        buffers[tile][...] = x[:, at * HALF : (at + 1) * HALF].astype(plan.shape.dtype)
    plgpu.commit_smem()
    for at, tile in enumerate(halves):
        target = refs[name].at[(*place, slice(None), pl.ds(at * HALF, HALF))]
        plgpu.copy_smem_to_gmem(buffers[tile], target)


def _finish(plan: Plan, refs, buffers, loaded, place, panels: Panels) -> None:
    """Store the pairs of tokens, and the inverse."""
    _settle()
    _store_pairs(plan, refs, buffers, place, "scores", _whole(panels.scores, panels.between))
    if not plan.shape.delta:
        return
    overlaps = _overlaps(plan, buffers, panels)
    if plan.save:
        _store_pairs(plan, refs, buffers, place, "overlaps", overlaps)
    plgpu.barrier_wait(loaded["beta"])
    x = overlaps * smem.over_columns(-smem.column(buffers["beta"]), overlaps.shape)
    halves = chunk_inverses.store_inverse(
        x, buffers, dtype=plan.shape.dtype, interpret=plan.interpret
    )
    plgpu.commit_smem()
    chunk_inverses.copy_inverse(halves, refs["inverse"].at[place])


def _settle() -> None:
    """Wait until the stores have read their tiles."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _body(plan: Plan, names, *args):
    *refs, buffers, loaded, left = args
    refs = dict(zip(names, refs, strict=True))
    role, program = lax.axis_index("role"), lax.axis_index("program")
    loaded = {name: x.at[role] for name, x in loaded.items()}
    every = buffers

    def own_buffers():
        return {name: x.at[lax.axis_index("role")] for name, x in every.items()}

    buffers = own_buffers()

    def place_of(i):
        # Where nothing is left a warpgroup repeats the last chunk.
        item = jnp.minimum((i * plan.programs + program) * plan.warpgroups + role, plan.items - 1)
        head, item = lax.rem(item, plan.shape.heads), lax.div(item, plan.shape.heads)
        return lax.div(item, plan.shape.chunks), lax.rem(item, plan.shape.chunks), head

    def keys_at(place, at):
        batch, chunk, head = place
        return batch, pl.ds(chunk * CHUNK, CHUNK), head, pl.ds(at * SLICE, SLICE)

    def load(step):
        own = keys_at(place_of(lax.div(step, plan.slices)), lax.rem(step, plan.slices))
        batch, tokens, head, channels = own
        shared = batch, tokens, lax.div(head, plan.shape.group), channels
        for name, source in (("g", own), ("q", shared), ("k", shared)):
            plgpu.copy_gmem_to_smem(refs[name].at[source], buffers[name], loaded["keys"])

    def part(i, place, at, panels):
        plgpu.barrier_wait(loaded["keys"])
        a = jnp.exp(plgpu.load(buffers["g"], layout=smem.MATRIX))
        q, k = (smem.matrix(buffers[x]) for x in "qk")
        # All warps have read the tiles, which are then filled again.
        plgpu.commit_smem()
        following = i * plan.slices + at + 1
        pl.when(following < plan.rounds * plan.slices)(lambda: load(following))
        made, panels = _decay(plan, buffers, q, k, a, panels)
        _settle()
        kept = made.pop("kept")
        for name, x in made.items():
            buffers[name][...] = x
        warp.store_row(buffers["kept"], kept, interpret=plan.interpret)
        plgpu.commit_smem()
        own = keys_at(place, at)
        for name in made:
            plgpu.copy_smem_to_gmem(buffers[name], refs[name].at[own])
        target = refs["kept"].at[(*place, own[-1])]
        plgpu.copy_smem_to_gmem(buffers["kept"], target)
        return panels

    def chunk(i, _):
        place = place_of(i)
        if plan.shape.delta:
            plgpu.copy_gmem_to_smem(refs["beta"].at[place], buffers["beta"], loaded["beta"])
        zero = jnp.zeros((CHUNK, BLOCK), jnp.float32)
        between = {x: zero for distances in DISTANCES.values() for x in distances}
        panels = Panels(zero, zero if plan.shape.delta else None, between)
        panels = lax.fori_loop(0, plan.slices, functools.partial(part, i, place), panels)
        # Recomputed: see `lanes.zero`.
        _finish(plan, refs, own_buffers(), loaded, place, panels)

    load(0)
    lax.fori_loop(0, plan.rounds, chunk, None)
    plgpu.wait_smem_to_gmem(0)
    # No warpgroup leaves while another multiplies.
    plgpu.barrier_arrive(left)
    plgpu.barrier_wait(left)


def decayed_chunks(shape: Shape, q, k, g, beta, *, save, interpret=None):
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
        A dictionary: `queries` and `writes` `[B, T, HV, K]`, `scores` `[B, N, HV, C, C]` in the
        dtype of `k`, and `kept` `[B, N, HV, K]` float32; with the delta rule also `keys`
        `[B, T, HV, K]`, the `inverse` and, if saved, the `overlaps` `M`, `[B, N, HV, C, C]`.
    """
    plan = Plan(shape=shape, save=save, interpret=interpret is not None)
    inputs = {"q": q, "k": k, "g": g} | ({} if beta is None else {"beta": beta})
    barriers = {"keys": plgpu.Barrier(num_arrivals=3, num_barriers=plan.warpgroups)}
    if shape.delta:
        barriers |= {"beta": plgpu.Barrier(num_barriers=plan.warpgroups)}
    names = (*inputs, *plan.outputs)
    kernel = plgpu.kernel(
        launches.named("decayed_chunks", functools.partial(_body, plan, names)),
        out_type=tuple(plan.outputs.values()),
        scratch_types=(_scratch(plan), barriers, plgpu.Barrier(num_arrivals=plan.warpgroups)),
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=plan.warpgroups,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return dict(zip(plan.outputs, kernel(*inputs.values()), strict=True))
