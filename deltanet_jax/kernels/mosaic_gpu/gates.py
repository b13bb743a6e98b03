"""The vectors of every chunk that the gates `g` and `beta` become, heads before tokens.

Of a gate per head, not lower than `LOG_ZERO`::

    b_i = g_1 + ... + g_i        decay = exp(b)        rest = exp(b_C - b)

A program makes some rows, each of one head in one chunk. What is read is contiguous over the
heads, what is written over the tokens, so it is turned in shared memory; for the rest the threads
of a row are neighbours in a warp. A thread has eight loads in flight and no loop: nothing here
takes longer than the launch until there are thousands of rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import tiles
from deltanet_jax.kernels.mosaic_gpu.lanes import thread_index
from deltanet_jax.kernels.mosaic_gpu.scalars import (
    add,
    bits_and,
    constant,
    divided,
    equal,
    less,
    not_equal,
    read,
    remainder,
    smaller,
    sums,
    times,
    write,
)
from deltanet_jax.kernels.mosaic_gpu.support import LOG_ZERO

__all__ = ["gate_gradient", "gate_vectors"]

CHUNK = tiles.CHUNK
ROWS = 8  # of a program: as many heads as fill what the memory gives at once, 32 bytes
VECTOR = 4  # tokens of a thread
LANES = CHUNK // VECTOR  # of a row
THREADS = ROWS * LANES
PITCH = CHUNK + VECTOR  # from row to row in shared memory: neither access meets a bank conflict


def _body(shape: tuple[int, int, int], names, outputs, interpret: bool, *args) -> None:
    *refs, turned = args
    inputs = dict(zip(names, refs[: len(names)], strict=True))
    results = dict(zip(outputs, refs[len(names) :], strict=True))
    if interpret:
        _interpreted(inputs, results)
        return
    first = lax.axis_index("program") * ROWS
    types = jax.tree.map(lambda _: plgpu.RefType(), (inputs, results, turned))
    inlined = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), *types))
    inlined(functools.partial(_rows, shape))(first, inputs, results, turned)


def _interpreted(inputs: dict, results: dict) -> None:
    x = {name: jnp.swapaxes(ref[...], 1, 2) for name, ref in inputs.items()}
    b = jnp.cumsum(jnp.maximum(x.pop("g"), LOG_ZERO), axis=-1)
    x |= {"b": b, "decay": jnp.exp(b), "rest": jnp.exp(b[..., -1:] - b)}
    for name, y in x.items():
        results[name][...] = y


def _rows(shape: tuple[int, int, int], ctx, first, inputs, results, turned) -> None:
    """The rows from `first` on; those past the last one are computed but not stored."""
    from jax.experimental.mosaic.gpu import utils

    del ctx
    chunks, _, heads = shape
    end = chunks * heads
    thread, first = thread_index(), first.registers.item()
    own, token = remainder(thread, ROWS), divided(thread, ROWS)
    row = smaller(add(first, own), end - 1)
    at = add(times(divided(row, heads), CHUNK * heads), remainder(row, heads))
    at = add(at, times(token, heads))
    step = THREADS // ROWS  # tokens from load to load
    loaded = {}
    for name, ref in inputs.items():
        source = utils.memref_ptr(ref)
        loaded[name] = [read(source, at, 1, after=i * heads) for i in range(0, CHUNK, step)]
    turned = {name: utils.memref_ptr(ref) for name, ref in turned.items()}
    for name, numbers in loaded.items():
        for i, x in enumerate(numbers):
            write(turned[name], add(times(own, PITCH), token), x, after=i * step)
    utils.warpgroup_barrier()
    own, lane = divided(thread, LANES), remainder(thread, LANES)
    token, row = times(lane, VECTOR), add(first, own)
    x = {name: read(ref, add(times(own, PITCH), token), VECTOR) for name, ref in turned.items()}
    x |= _exponentials(lane, x.pop("g"))
    with utils.when(less(row, end)):
        for name, numbers in x.items():
            write(utils.memref_ptr(results[name]), add(times(row, CHUNK), token), numbers)


def _exponentials(lane, g: list) -> dict[str, list]:
    """`b` and what the kernels read of it, of four tokens."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import arith, math

    first, *others = [arith.maximumf(x, constant(LOG_ZERO)) for x in g]
    b = [first]
    for x in others:
        b.append(arith.addf(b[-1], x))
    # The last lane adds up `b` as all of them do the total, so that its last `rest` is 1.
    total = b[-1]
    for size in (1 << i for i in range(LANES.bit_length() - 1)):
        other = utils.shfl_bfly(total, size)
        before = arith.select(not_equal(bits_and(lane, size), 0), other, constant(0.0))
        b = [arith.addf(x, before) for x in b]
        total = arith.addf(total, other)
    decay = [math.exp(x) for x in b]
    rest = [math.exp(arith.subf(total, x)) for x in b]
    return {"b": b, "decay": decay, "rest": rest}


def gate_vectors(g: jax.Array, beta: jax.Array | None, *, interpret=None) -> dict[str, jax.Array]:
    """The vectors of every chunk.

    Args:
        g: Log-decay of one gate per head, `[B, T, HV]` float32, with T a multiple of 64.
        beta: `[B, T, HV]` float32, or `None` without the delta rule.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        By name `b`, `decay`, `rest` and, if there is one, `beta`: `[B, N, HV, C]` float32.
    """
    batch, tokens, heads = g.shape
    chunks = tokens // CHUNK
    shape = (batch * chunks, CHUNK, heads)
    inputs = {"g": g} | ({} if beta is None else {"beta": beta})
    outputs = ("b", "decay", "rest", "beta")[: 2 + len(inputs)]
    out_type = jax.ShapeDtypeStruct((batch * chunks, heads, CHUNK), jnp.float32)
    body = functools.partial(_body, shape, tuple(inputs), outputs, interpret is not None)
    kernel = plgpu.kernel(
        tiles.named("gate_vectors", body),
        out_type=[out_type] * len(outputs),
        scratch_types=(dict.fromkeys(inputs, plgpu.SMEM((ROWS, PITCH), jnp.float32)),),
        grid=(1 if interpret else pl.cdiv(batch * chunks * heads, ROWS),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    out = kernel(*(x.reshape(shape) for x in inputs.values()))
    sizes = (batch, chunks, heads, CHUNK)
    return {name: x.reshape(sizes) for name, x in zip(outputs, out, strict=True)}


def gate_gradient(parts: dict, b: jax.Array, *, scale: float, interpret=None) -> jax.Array:
    """The gradient of `g`: the sum of that of `b` over a token and the later ones of its chunk.

    Args:
        parts: Of the gradient of `b`, `[M, B, N, HV, C]` float32 each, to be summed over M. `db_q`
            and `db_k` belong to the tokens; `overlap`, times `scale exp(b_C)`, and `db_write`,
            times `scale`, to the last one, whichever row they are in.
        b: `[B, N, HV, C]` float32.
        scale: Factor on `q`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `[B, T, HV]` float32.
    """
    batch, chunks, heads, _ = b.shape
    inputs = {"b": b} | parts
    names = tuple(inputs)
    shape = batch * chunks, CHUNK, heads
    blocks = parts["db_q"].shape[0]

    def body(*args):
        *refs, out, turned = args
        refs = dict(zip(names, refs, strict=True))
        if interpret is not None:
            _interpreted_gradient(scale, refs, out)
            return
        first = lax.axis_index("program") * ROWS
        types = jax.tree.map(lambda _: plgpu.RefType(), (refs, out, turned))
        inlined = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), *types))
        inlined(functools.partial(_gradient_rows, shape, blocks, scale))(first, refs, out, turned)

    kernel = plgpu.kernel(
        tiles.named("gate_gradient", body),
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=(plgpu.SMEM((ROWS, PITCH), jnp.float32),),
        grid=(1 if interpret else pl.cdiv(batch * chunks * heads, ROWS),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return kernel(*inputs.values()).reshape(batch, chunks * CHUNK, heads)


def _interpreted_gradient(scale: float, refs: dict, out) -> None:
    x = {name: ref[...] for name, ref in refs.items()}
    kept = jnp.exp(x["b"][..., -1:])
    last = scale * (kept * x["overlap"] + x["db_write"]).sum((0, -1))
    db = (x["db_q"] + x["db_k"]).sum(0).at[..., -1].add(last)
    dg = lax.cumsum(db, axis=3, reverse=True)
    out[...] = jnp.swapaxes(dg.reshape(-1, *dg.shape[2:]), 1, 2)


def _gradient_rows(shape, blocks: int, scale: float, ctx, first, refs, out, turned) -> None:
    """`_rows` the other way: what is read is contiguous over the tokens."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import arith, math

    del ctx
    chunks, _, heads = shape
    end = chunks * heads
    thread, first = thread_index(), first.registers.item()
    lane, row = remainder(thread, LANES), add(first, divided(thread, LANES))
    token, chunk = times(lane, VECTOR), times(smaller(row, end - 1), CHUNK)
    at = add(chunk, token)
    turned, refs = utils.memref_ptr(turned), {x: utils.memref_ptr(y) for x, y in refs.items()}
    total = read(refs.pop("b"), chunk, 1, after=CHUNK - 1)[0]
    x = {}
    for name, ref in refs.items():
        loaded = [read(ref, at, VECTOR, after=i * end * CHUNK) for i in range(blocks)]
        x[name] = functools.reduce(sums, loaded)
    later = sums(x["db_q"], x["db_k"])
    for i in range(VECTOR - 2, -1, -1):
        later[i] = arith.addf(later[i], later[i + 1])
    kept = math.exp(total)
    last = [math.fma(kept, y, z) for y, z in zip(x["overlap"], x["db_write"], strict=True)]
    last = arith.mulf(functools.reduce(arith.addf, last), constant(scale))
    block = later[0]
    for size in (1 << i for i in range(LANES.bit_length() - 1)):
        last = arith.addf(last, utils.shfl_bfly(last, size))
        other = utils.shfl_bfly(block, size)
        after = arith.select(equal(bits_and(lane, size), 0), other, constant(0.0))
        later = [arith.addf(x, after) for x in later]
        block = arith.addf(block, other)
    dg = [arith.addf(x, last) for x in later]
    write(turned, add(times(divided(thread, LANES), PITCH), token), dg)
    utils.warpgroup_barrier()
    own, token = remainder(thread, ROWS), divided(thread, ROWS)
    row = add(first, own)
    at = add(times(divided(row, heads), CHUNK * heads), remainder(row, heads))
    at = add(at, times(token, heads))
    out = utils.memref_ptr(out)
    with utils.when(less(row, end)):
        for i in range(0, CHUNK, THREADS // ROWS):
            x = read(turned, add(times(own, PITCH), token), 1, after=i)
            write(out, at, x, after=i * heads)
