"""The inverse that the delta rule needs of every chunk, all chunks in parallel.

Rows of one chunk, `D_ij = exp(b_i - b_j)`::

    T = (I + L)^-1        L = stril(D * (k k^T) * beta_j)

`beta` stands on the columns, so that `u = T (v - exp(b) k S)` and the values that are written
are `beta u`: every gradient is then free of divisions by `beta`.

The inverse is never formed by powers of `L`. Blocks of 16 rows are inverted by substitution in
float32; then blocks on the diagonal double in size, and only the block below each pair is new:
`X <- X - X (L between the pair) X`. Products of 16-bit pairs (high and low halves, three
products) keep 16 bits of mantissa, tf32 would keep 11.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import lanes, tiles

__all__ = [
    "below_diagonal",
    "chunk_inverses",
    "copy_inverse",
    "inverse_buffers",
    "sides",
    "store_inverse",
]

CHUNK = tiles.CHUNK
BLOCK = lanes.BLOCK  # also the smallest depth of a product
HALF = 2 * BLOCK


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch; a program is one chunk of one head."""

    batch: int
    chunks: int
    heads: int  # value heads
    group: int  # value heads per key head
    key_dim: int
    dtype: jnp.dtype
    gated: bool
    interpret: bool


def sides(dtype) -> tuple[str, str]:
    """Tiles for the halves of the result; in bfloat16 a pair that nothing reads any more."""
    return ("below_high", "below_low") if dtype == jnp.bfloat16 else ("left", "right")


def inverse_buffers(dtype, *count: int) -> dict:
    """What `store_inverse` needs in shared memory, `count` times."""
    pair = tiles.tile(*count, CHUNK, HALF, dtype=jnp.bfloat16, swizzle=2 * BLOCK)
    buffers = {"below_high": pair, "below_low": pair, "inner_high": pair, "inner_low": pair}
    buffers |= {"new_high": pair, "new_low": pair}
    buffers |= {"blocks": plgpu.SMEM((*count, CHUNK, BLOCK), jnp.float32)}
    return buffers | {
        x: tiles.tile(*count, CHUNK, HALF, dtype=dtype) for x in sides(dtype) if x not in buffers
    }


def _iota(axis: int, width: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, width), axis, layout=tiles.MATRIX)


def _store_pair(pair, x: jax.Array, interpret: bool) -> None:
    """Stores `x` as the sum of two bfloat16 tiles."""
    high = lanes.rounded(x, interpret=interpret)
    pair[0][...] = high.astype(jnp.bfloat16)
    pair[1][...] = (x - high).astype(jnp.bfloat16)


def _at(pair, *index):
    return tuple(half.at[index] for half in pair)


def _operands(x, y, width: int):
    """`x y` of two pairs, without the product of the two low halves."""
    return (CHUNK, width), ((x[0], y[0]), (x[0], y[1]), (x[1], y[0]))


def _product(x, y, width: int) -> jax.Array:
    shape, pairs = _operands(x, y, width)
    return tiles.product(shape, *pairs)


def _blockwise(x, y, blocks) -> jax.Array:
    """Rows of block i: block i of `x` times block `blocks[i]` of `y`; zero where that is None."""
    wanted = [(i, other) for i, other in enumerate(blocks) if other is not None]
    rows = [_at(y, pl.ds(other * BLOCK, BLOCK), slice(None)) for _, other in wanted]
    results = tiles.products(*(_operands(x, r, BLOCK) for r in rows))
    row_block = lax.div(_iota(0, BLOCK), BLOCK)
    total = jnp.zeros((CHUNK, BLOCK), jnp.float32)
    for (i, _), result in zip(wanted, results, strict=True):
        total = jnp.where(row_block == i, result, total)
    return total


def _panel(x: jax.Array, blocks) -> jax.Array:
    """Rows of block i: the columns of block `blocks[i]`; zero where that is None."""
    row_block = lax.div(_iota(0, BLOCK), BLOCK)
    total = jnp.zeros((CHUNK, BLOCK), jnp.float32)
    for block, other in enumerate(blocks):
        if other is not None:
            columns = x[:, other * BLOCK : (other + 1) * BLOCK]
            total = jnp.where(row_block == block, columns, total)
    return total


def _inverse(x: jax.Array, blocks, below, inner, new, interpret: bool):
    """`(I + x)^-1` of a strictly lower triangular chunk, as its left and its right half.

    Two barriers for each merge are enough: a warp reads of a left operand only the rows that it
    wrote, and of a right operand nothing that is written before the next barrier.
    """
    narrow = (slice(None), pl.ds(0, BLOCK))
    left, right, middle = (_at(pair, *narrow) for pair in (below, inner, new))
    store = functools.partial(_store_pair, interpret=interpret)
    store(left, _panel(x, (None, 0, None, 2)))
    inverse = lanes.block_inverses(_panel(x, (0, 1, 2, 3)), blocks, interpret=interpret)
    store(right, inverse)
    plgpu.commit_smem()
    store(middle, _blockwise(left, right, (None, 0, None, 2)))
    plgpu.commit_smem()
    lower = _blockwise(right, middle, (None, 1, None, 3))
    even = lax.rem(lax.div(_iota(0, BLOCK), BLOCK), 2) == 0
    inverse = jnp.concatenate(
        (jnp.where(even, inverse, -lower), jnp.where(even, 0.0, inverse)), axis=1
    )
    # From the inverses of the two halves, side by side, to the whole.
    bottom = _iota(0, HALF) >= HALF
    store(below, jnp.where(bottom, x[:, :HALF], 0.0))
    store(inner, inverse)
    plgpu.commit_smem()
    store(new, _product(below, _at(inner, pl.ds(0, HALF), slice(None)), HALF))
    plgpu.commit_smem()
    corner = _product(inner, _at(new, pl.ds(HALF, HALF), slice(None)), HALF)
    return jnp.where(bottom, -corner, inverse), jnp.where(bottom, inverse, 0.0)


def store_inverse(x: jax.Array, buffers, *, dtype, interpret: bool) -> tuple:
    """Stores `(I + x)^-1` of a strictly lower triangular chunk in two tiles, left and right half.

    Until the inverse is read, nothing of `buffers` may be in use. `commit_smem` is the caller's.
    """
    below = buffers["below_high"], buffers["below_low"]
    inner = buffers["inner_high"], buffers["inner_low"]
    new = buffers["new_high"], buffers["new_low"]
    halves = tuple(buffers[name] for name in sides(dtype))
    parts = _inverse(x, buffers["blocks"], below, inner, new, interpret)
    for half, part in zip(halves, parts, strict=True):
        half[...] = part.astype(dtype)
    return halves


def copy_inverse(halves: tuple, out) -> None:
    """Sends a stored inverse to `out`, `[C, C]` in device memory."""
    for at, half in enumerate(halves):
        plgpu.copy_smem_to_gmem(half, out.at[:, pl.ds(at * HALF, HALF)])


def below_diagonal(plan, tile) -> jax.Array:
    """`stril(D * (k k^T) * beta_j)` of a chunk."""
    x = tiles.product((CHUNK, CHUNK), (tile["k"], tiles.transposed(tile["k"])))
    x *= tiles.over_columns(tiles.column(tile["beta"]), x.shape)
    return tiles.decayed(plan, tile, x, strict=True)


def _body(plan: Plan, names, *args):
    *refs, buffers, loaded = args
    refs = dict(zip(names, refs, strict=True))
    item = lax.axis_index("program")
    head, item = lax.rem(item, plan.heads), lax.div(item, plan.heads)
    batch, chunk = lax.div(item, plan.chunks), lax.rem(item, plan.chunks)
    keys = refs["k"].at[batch, pl.ds(chunk * CHUNK, CHUNK), lax.div(head, plan.group)]
    plgpu.copy_gmem_to_smem(keys, buffers["k"], loaded)
    for name in ("beta", "b", "b_column"):
        if name in buffers:
            plgpu.copy_gmem_to_smem(refs[name].at[batch, chunk, head], buffers[name], loaded)
    plgpu.barrier_wait(loaded)
    x = below_diagonal(plan, buffers)
    halves = store_inverse(x, buffers, dtype=plan.dtype, interpret=plan.interpret)
    plgpu.commit_smem()
    copy_inverse(halves, refs["out"].at[batch, chunk, head])
    plgpu.wait_smem_to_gmem(0)


def chunk_inverses(k, beta, b, *, interpret=None):
    """`T` of every chunk.

    Args:
        k: `[B, T, H, K]` with T a multiple of 64, in 16 bits.
        beta: `[B, N, HV, C]` float32.
        b: In-chunk cumulative log-decay, `[B, N, HV, C]` float32, or `None` without a gate.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `[B, N, HV, C, C]` in the dtype of `k`.
    """
    batch, _, key_heads, key_dim = k.shape
    _, chunks, heads, _ = beta.shape
    plan = Plan(
        batch, chunks, heads, heads // key_heads, key_dim, k.dtype, b is not None, bool(interpret)
    )
    vector = plgpu.SMEM((CHUNK,), jnp.float32)
    buffers = {"k": tiles.tile(CHUNK, key_dim, dtype=k.dtype), "beta": vector}
    buffers |= inverse_buffers(k.dtype)
    inputs = {"k": k, "beta": beta}
    if b is not None:
        inputs |= {"b": b, "b_column": b}
        buffers |= {"b": vector, "b_column": vector}
    kernel = plgpu.kernel(
        tiles.named("chunk_inverses", functools.partial(_body, plan, (*inputs, "out"))),
        out_type=jax.ShapeDtypeStruct((batch, chunks, heads, CHUNK, CHUNK), k.dtype),
        scratch_types=(buffers, plgpu.Barrier(num_arrivals=len(inputs))),
        grid=(batch * chunks * heads,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return kernel(*inputs.values())
