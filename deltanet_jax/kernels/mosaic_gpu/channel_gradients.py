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
from typing import NamedTuple

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
from deltanet_jax.kernels.mosaic_gpu.decayed_chunks import SLICE, SWIZZLE
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["chunk_gradients"]

KEYS = (CHUNK, SLICE)
SQUARE = (CHUNK, CHUNK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch; a thread block has one chunk of one head."""

    shape: Shape
    interpret: bool

    @property
    def cotangents(self) -> tuple[str, ...]:
        return ("queries", "writes") + ("keys",) * self.shape.delta

    @property
    def pairs(self) -> tuple[str, ...]:
        return ("scores",) + ("overlaps",) * self.shape.delta


def _scratch(plan: Plan):
    # Of one place: see `lanes.zero`.
    keys = smem.tile(1, *KEYS, dtype=plan.shape.dtype, swizzle=SWIZZLE)
    square = smem.tile(1, *SQUARE, dtype=plan.shape.dtype, swizzle=SWIZZLE)
    buffers = dict.fromkeys(("q", "k", *plan.cotangents), keys)
    buffers |= dict.fromkeys(("g", "dg"), smem.tile(1, *KEYS, dtype=jnp.float32))
    buffers |= {"kept": plgpu.SMEM((1, SLICE), jnp.float32)}
    for size in channel_decay.BETWEEN:
        buffers |= {f"q{size}": keys, f"k{size}": keys}
        buffers |= {f"{name}{size}": square for name in plan.pairs}
    for uniform in (True, False):
        shape = warp.exchange_shape(SLICE, uniform=uniform)
        buffers |= {f"exchange{'_up' * uniform}": plgpu.SMEM((1, *shape), jnp.float32)}
    loaded = {
        "pairs": plgpu.Barrier(num_arrivals=len(plan.pairs)),
        "keys": plgpu.Barrier(num_arrivals=4),
        "cotangents": plgpu.Barrier(num_arrivals=len(plan.cotangents)),
    }
    return buffers, loaded


def _cut_pairs(plan: Plan, buffers, name: str) -> jax.Array:
    """Make a tile of the pairs of each size between blocks of 16; return those within.

    The gradients of all pairs arrive in the tile of the smallest of these sizes.
    """
    first, *_ = channel_decay.BETWEEN
    x = smem.matrix(buffers[f"{name}{first}"])
    row_block = lax.div(
        plgpu.broadcasted_iota(jnp.int32, (CHUNK, BLOCK), 0, layout=smem.MATRIX), BLOCK
    )
    within = jnp.zeros((CHUNK, BLOCK), jnp.float32)
    for block in range(CHUNK // BLOCK):
        columns = x[:, block * BLOCK : (block + 1) * BLOCK]
        within = jnp.where(row_block == block, columns, within)
    for size in channel_decay.BETWEEN:
        share = jnp.where(channel_decay.pairs(size), x, 0.0)
        buffers[f"{name}{size}"][...] = share.astype(plan.shape.dtype)
    return within


def _level_within(plan: Plan, panels, size: int, queries, keys):
    """`dq'` and `dk'` of one size below 16."""
    mask = channel_decay.pairs(size, BLOCK)
    scores, *overlaps = (jnp.where(mask, x, 0.0).astype(plan.shape.dtype) for x in panels)
    terms = [(scores, queries, True)]
    for x in overlaps:
        terms += [(x, keys, False), (x, keys, True)]
    apply = functools.partial(warp.apply_blocks, interpret=plan.interpret)
    return apply((scores, keys, False)), apply(*terms)


def _level_between(plan: Plan, buffers, size: int, queries, keys):
    """`dq'` and `dk'` of one size from 16."""
    q, k = (buffers[f"{x}{size}"] for x in "qk")
    q[...] = queries
    k[...] = keys
    plgpu.commit_smem()
    scores, *overlaps = (buffers[f"{name}{size}"] for name in plan.pairs)
    pairs = [(smem.transposed(scores), q)]
    for x in overlaps:
        pairs += [(x, k), (smem.transposed(x), k)]
    return mma.products((KEYS, [(scores, k)]), (KEYS, pairs))


def _ends(plan: Plan, buffers, q, k, blocks, dq, dk):
    """Differentiate the operands that meet states; return gradients of the whole chunk's sums."""
    through, after = blocks.from_start, blocks.to_end

    def rounded(x):
        return lanes.widened(x.astype(plan.shape.dtype), interpret=plan.interpret)

    d_queries, d_writes, *d_keys = (smem.matrix(buffers[x]) for x in plan.cotangents)
    d_through = rounded(through * q) * d_queries
    dq += through * d_queries
    dk += after * d_writes
    for x in d_keys:
        d_through += rounded(through * k) * x
        dk += through * x
    d_kept = smem.over_columns(smem.column(buffers["kept"]), KEYS)
    first = plgpu.broadcasted_iota(jnp.int32, KEYS, 0, layout=smem.MATRIX) == 0
    d_block = jnp.where(first, blocks.block * d_kept, 0.0)
    return dq, dk, channel_decay.Sums(d_through, rounded(after * k) * d_writes, d_block)


def _slice(plan: Plan, buffers, panels, diagonal, wait_cotangents, load_next) -> dict:
    """The gradients of 32 channels of q, k and g by name.

    Calls `wait_cotangents` before those gradients are read, and `load_next` when nothing reads q,
    k and g any more.
    """
    exchange = functools.partial(warp.exchanged, interpret=plan.interpret)
    up = functools.partial(exchange, scratch=buffers["exchange_up"], uniform=True)
    down = functools.partial(exchange, scratch=buffers["exchange"], uniform=False)

    def load():
        # In 16 bits these take half of the registers between their uses.
        return (smem.matrix(buffers[x]) for x in "qk")

    def wide(x):
        return lanes.widened(x, interpret=plan.interpret)

    blocks = channel_decay.single(jnp.exp(plgpu.load(buffers["g"], layout=smem.MATRIX)))
    q, k = load()
    dq, dk, dg = diagonal * k, diagonal * q, jnp.zeros(KEYS, jnp.float32)
    levels = dict.fromkeys(channel_decay.SIZES)
    for size in channel_decay.SIZES:
        factor = blocks.factor
        q, k = load()
        queries, keys = (factor * q).astype(plan.shape.dtype), (factor * k).astype(plan.shape.dtype)
        if size in channel_decay.WITHIN:
            d_queries, d_keys = _level_within(plan, panels, size, queries, keys)
        else:
            d_queries, d_keys = _level_between(plan, buffers, size, queries, keys)
        dq += factor * d_queries
        dk += factor * d_keys
        level = wide(queries) * d_queries + wide(keys) * d_keys
        if size in channel_decay.WITHIN[:-1]:
            # Sooner than on the way down, when all of these would be waiting in registers.
            dg += channel_decay.gate_gradient(size, level, down)
        elif size in channel_decay.WITHIN:
            # The longest way; this one waits in the tile of its result.
            buffers["dg"][...] = level
        else:
            levels[size] = level
        blocks = channel_decay.doubled(blocks, size, up)
    wait_cotangents()
    dq, dk, d = _ends(plan, buffers, *load(), blocks, dq, dk)
    plgpu.commit_smem()
    load_next()
    for size in reversed(channel_decay.SIZES):
        level = levels[size]
        if size == channel_decay.WITHIN[-1]:
            level = plgpu.load(buffers["dg"], layout=smem.MATRIX)
        d = channel_decay.transposed(d, size, level, down)
    return {"dq": dq.astype(plan.shape.dtype), "dk": dk.astype(plan.shape.dtype), "dg": dg + d.g}


class _Chunk(NamedTuple):
    """Position of the chunk of a thread block."""

    batch: jax.Array
    chunk: jax.Array
    head: jax.Array

    def channels(self, at, head=None) -> tuple:
        """32 channels of the tokens, of another head if given."""
        tokens = pl.ds(self.chunk * CHUNK, CHUNK)
        return self.batch, tokens, self.head if head is None else head, pl.ds(at * SLICE, SLICE)


def _load_keys(plan: Plan, refs, buffers, loaded, own: _Chunk, at) -> None:
    """Issue the loads of 32 channels that come first."""
    shared = own.channels(at, lax.div(own.head, plan.shape.group))
    places = {"g": own.channels(at), "q": shared, "k": shared, "kept": (*own, shared[-1])}
    for name, place in places.items():
        plgpu.copy_gmem_to_smem(refs[name].at[place], buffers[name], loaded["keys"])


def _panels(plan: Plan, refs, buffers, loaded, own: _Chunk) -> list[jax.Array]:
    """Load the gradients of pairs, and make the tiles of those between blocks of 16."""
    first, *_ = channel_decay.BETWEEN
    for name in plan.pairs:
        source = refs[name].at[tuple(own)]
        plgpu.copy_gmem_to_smem(source, buffers[f"{name}{first}"], loaded["pairs"])
    plgpu.barrier_wait(loaded["pairs"])
    return [_cut_pairs(plan, buffers, name) for name in plan.pairs]


def _body(plan: Plan, names, *args):
    *refs, buffers, loaded = args
    refs = dict(zip(names, refs, strict=True))
    item = lax.axis_index("program")
    head, item = lax.rem(item, plan.shape.heads), lax.div(item, plan.shape.heads)
    own = _Chunk(lax.div(item, plan.shape.chunks), lax.rem(item, plan.shape.chunks), head)

    def placed():
        zero = lanes.zero(interpret=plan.interpret)
        return {name: x.at[zero] for name, x in buffers.items()}

    def step(at, _):
        tile = placed()
        # The gradients of q and k leave through tiles that were read.
        leave = {"dq": tile["queries"], "dk": tile["writes"], "dg": tile["dg"]}

        def load_next():
            load = functools.partial(_load_keys, plan, refs, tile, loaded, own)
            pl.when((at + 1) * SLICE < plan.shape.key_dim)(lambda: load(at + 1))

        def wait_cotangents():
            plgpu.barrier_wait(loaded["cotangents"])

        plgpu.barrier_wait(loaded["keys"])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for name in plan.cotangents:
            source = refs[name].at[own.channels(at)]
            plgpu.copy_gmem_to_smem(source, tile[name], loaded["cotangents"])
        gradients = _slice(plan, tile, panels, diagonal, wait_cotangents, load_next)
        for name, x in gradients.items():
            leave[name][...] = x
        plgpu.commit_smem()
        for name, x in leave.items():
            plgpu.copy_smem_to_gmem(x, refs[name].at[own.channels(at)])

    first = placed()
    _load_keys(plan, refs, first, loaded, own, 0)
    panels = _panels(plan, refs, first, loaded, own)
    diagonal = jnp.where(channel_decay.pairs(0, BLOCK), panels[0], 0.0).sum(axis=1)
    diagonal = smem.over_rows(diagonal, KEYS)
    lax.fori_loop(0, plan.shape.key_dim // SLICE, step, None)
    plgpu.wait_smem_to_gmem(0)


def chunk_gradients(shape: Shape, q, k, g, cotangents, *, interpret=None):
    """`dq`, `dk` and `dg` of all chunks.

    Args:
        shape: Sizes and variant of the call.
        q: `[B, T, H, K]` with T a multiple of 64, in 16 bits.
        k: The same shape.
        g: Log-decay, `[B, T, HV, K]` float32; -inf forgets.
        cotangents: The result of `chunk_cotangents`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `dq`, `dk` `[B, T, HV, K]` in the dtype of `q` (one for each value head) and `dg` float32.
    """
    plan = Plan(shape=shape, interpret=interpret is not None)
    inputs = {"q": q, "k": k, "g": g, "kept": cotangents["kept"]}
    inputs |= {name: cotangents[name] for name in plan.cotangents + plan.pairs}
    array = jax.ShapeDtypeStruct
    outputs = {"dq": array(g.shape, q.dtype), "dk": array(g.shape, q.dtype)}
    outputs |= {"dg": array(g.shape, jnp.float32)}
    kernel = plgpu.kernel(
        launches.named("channel_gradients", functools.partial(_body, plan, (*inputs, *outputs))),
        out_type=tuple(outputs.values()),
        scratch_types=_scratch(plan),
        grid=(shape.batch * shape.chunks * shape.heads,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return kernel(*inputs.values())
