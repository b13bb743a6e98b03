"""The vectors of a scalar gate in every chunk, and its gradient.

Of gates raised to `LOWEST_GATE` at least, heads before tokens::

    b_i = g_1 + ... + g_i        decay = exp(b)        rest = exp(b_C - b)

A thread block makes some rows, each of one head in one chunk. On one side memory is contiguous over
the heads, on the other over the tokens, so it is turned in shared memory; for the rest the threads
of a row are neighbours in a warp. A thread has all its loads in flight and no loop: XLA would take
five kernels for the vectors and as many for the gradient, each with little to do.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, math

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, launches
from deltanet_jax.kernels.mosaic_gpu.blocks.lanes import thread_index
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.ptx import (
    Value,
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
from deltanet_jax.kernels.mosaic_gpu.support import LOWEST_GATE

__all__ = ["GateParts", "GateVectors", "gate_gradient", "gate_vectors"]

Record = TypeVar("Record")

ROWS = 8  # of a thread block: as many heads as fill what the memory gives at once, 32 bytes
VECTOR = 4  # tokens of a thread
LANES = CHUNK // VECTOR  # of a row
STEP = LANES  # tokens from one access of a thread to the next, on the side of the heads
PITCH = CHUNK + VECTOR  # from row to row in shared memory: neither access meets a bank conflict


class Gates(NamedTuple):
    """Values of a token for every value head, `[B, T, HV]`, or rows of them in shared memory."""

    g: Ref  # log-decay
    beta: Ref = None  # `None` without the delta rule


class GateVectors(NamedTuple):
    """The vectors of every chunk, `[B, N, HV, C]` float32."""

    b: Ref
    decay: Ref
    rest: Ref
    beta: Ref = None  # `None` without the delta rule


class GateParts(NamedTuple):
    """Parts of the gradient of `b`, `[M, B, N, HV, C]` float32, to be summed over M."""

    db_q: Ref  # of the tokens
    db_k: Ref
    overlap: Ref  # of the last token, whichever row it is in, times `scale exp(b_C)`
    db_write: Ref  # of the last token, times `scale`


class _Parts(NamedTuple):
    b: Ref
    parts: GateParts


def _launch(
    name: str,
    by_thread: Callable[..., None],
    plain: Callable[[Any, Any], None],
    inputs: Any,
    outputs: Record,
    turned: Any,
    *,
    rows: int,
    interpret: object,
) -> Record:
    """Run `by_thread(first row, inputs, outputs, turned)` for some rows in every thread block.

    Args:
        name: Name of the kernel in profiles.
        by_thread: Work of a thread.
        plain: `(inputs, outputs)`, the same for the interpreter, of all rows.
        inputs: Record of arrays.
        outputs: Record of types.
        turned: Record of arrays whose rows pass through shared memory.
        rows: Number of rows.
        interpret: Interpreter parameters, or `None` for the device.
    """

    def body(sources: Any, results: Any, scratch: Any) -> None:
        if interpret is not None:
            plain(sources, results)
            return
        first = lax.axis_index("program") * ROWS
        types = jax.tree.map(lambda _: plgpu.RefType(), (sources, results, scratch))
        inlined = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), *types))
        inlined(by_thread)(first, sources, results, scratch)

    return launches.launch(
        name,
        body,
        inputs,
        outputs,
        jax.tree.map(lambda _: plgpu.SMEM((ROWS, PITCH), jnp.float32), turned),
        programs=1 if interpret else pl.cdiv(rows, ROWS),
        approximate=False,
        interpret=interpret,
    )


def _plain_vectors(inputs: Gates, results: GateVectors) -> None:
    g = jnp.swapaxes(inputs.g[...], 1, 2)
    b = jnp.cumsum(jnp.maximum(g, LOWEST_GATE), axis=-1)
    results.b[...] = b
    results.decay[...] = jnp.exp(b)
    results.rest[...] = jnp.exp(b[..., -1:] - b)
    if inputs.beta is not None:
        results.beta[...] = jnp.swapaxes(inputs.beta[...], 1, 2)


def _turned_place(first: Value, thread: Value, heads: int, end: int) -> tuple[Value, Value, Value]:
    """Return offsets of a thread's first value in shared and device memory, on the heads' side.

    And whether its row exists; for rows past the last one, that one is read.
    """
    own, token = remainder(thread, ROWS), divided(thread, ROWS)
    row = add(first, own)
    kept = smaller(row, end - 1)
    at = add(times(divided(kept, heads), CHUNK * heads), remainder(kept, heads))
    return add(times(own, PITCH), token), add(at, times(token, heads)), less(row, end)


def _vector_rows(
    shape: tuple[int, int, int],
    ctx: object,
    first: Value,
    inputs: Gates,
    results: GateVectors,
    turned: Gates,
) -> None:
    """The rows from `first` on; those past the last one are computed but not stored."""
    del ctx
    chunks, _, heads = shape
    thread, first = thread_index(), first.registers.item()
    place, at, _ = _turned_place(first, thread, heads, chunks * heads)
    loaded = []
    for ref in _present(inputs.beta, inputs.g):
        source = utils.memref_ptr(ref)
        loaded += [[read(source, at, 1, after=i * heads) for i in range(0, CHUNK, STEP)]]
    pointers = [utils.memref_ptr(ref) for ref in _present(turned.beta, turned.g)]
    for pointer, values in zip(pointers, loaded, strict=True):
        for i, x in enumerate(values):
            write(pointer, place, x, after=i * STEP)
    utils.warpgroup_barrier()
    own, lane = divided(thread, LANES), remainder(thread, LANES)
    token, row = times(lane, VECTOR), add(first, own)
    *beta, g = (read(pointer, add(times(own, PITCH), token), VECTOR) for pointer in pointers)
    vectors = (*beta, *_exponentials(lane, g))
    targets = _present(results.beta, results.b, results.decay, results.rest)
    with utils.when(less(row, chunks * heads)):
        for target, numbers in zip(targets, vectors, strict=True):
            write(utils.memref_ptr(target), add(times(row, CHUNK), token), numbers)


def _present(*refs: Ref) -> list[Ref]:
    return [ref for ref in refs if ref is not None]


def _exponentials(lane: Value, g: list[Value]) -> tuple[list[Value], list[Value], list[Value]]:
    """`b`, exp(b) and exp(b_C - b) of four tokens."""
    first, *others = [arith.maximumf(x, constant(LOWEST_GATE)) for x in g]
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
    return b, decay, rest


def gate_vectors(g: jax.Array, beta: jax.Array | None, *, interpret: object = None) -> GateVectors:
    """The vectors of every chunk.

    Args:
        g: Log-decay of one gate per head, `[B, T, HV]` float32, with T a multiple of 64.
        beta: `[B, T, HV]` float32, or `None` without the delta rule.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The vectors.
    """
    batch, tokens, heads = g.shape
    shape = (batch * tokens // CHUNK, CHUNK, heads)
    inputs = jax.tree.map(lambda x: x.reshape(shape), Gates(g, beta))
    row = jax.ShapeDtypeStruct((shape[0], heads, CHUNK), jnp.float32)
    out = _launch(
        "gate_vectors",
        functools.partial(_vector_rows, shape),
        _plain_vectors,
        inputs,
        GateVectors(row, row, row, None if beta is None else row),
        inputs,
        rows=shape[0] * heads,
        interpret=interpret,
    )
    return GateVectors(*(x if x is None else x.reshape(batch, -1, heads, CHUNK) for x in out))


def gate_gradient(
    parts: GateParts, b: jax.Array, *, scale: float, interpret: object = None
) -> jax.Array:
    """The gradient of `g`: the sum of that of `b` over a token and the later ones of its chunk.

    Args:
        parts: Parts of the gradient of `b`.
        b: `[B, N, HV, C]` float32.
        scale: Factor on `q`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `[B, T, HV]` float32.
    """
    batch, chunks, heads, _ = b.shape
    shape = batch * chunks, CHUNK, heads
    blocks = parts.db_q.shape[0]
    dg: Ref = jax.ShapeDtypeStruct(shape, jnp.float32)
    out: jax.Array = _launch(
        "gate_gradient",
        functools.partial(_gradient_rows, shape, blocks, scale),
        functools.partial(_plain_gradient, scale),
        _Parts(b, parts),
        dg,
        dg,
        rows=dg.size // CHUNK,
        interpret=interpret,
    )
    return out.reshape(batch, chunks * CHUNK, heads)


def _plain_gradient(scale: float, refs: _Parts, result: Ref) -> None:
    b, (db_q, db_k, overlap, db_write) = jax.tree.map(lambda ref: ref[...], refs)
    last = scale * (jnp.exp(b[..., -1:]) * overlap + db_write).sum((0, -1))
    db = (db_q + db_k).sum(0).at[..., -1].add(last)
    dg = lax.cumsum(db, axis=3, reverse=True)
    result[...] = jnp.swapaxes(dg.reshape(-1, *dg.shape[2:]), 1, 2)


def _gradient_rows(
    shape: tuple[int, int, int],
    blocks: int,
    scale: float,
    ctx: object,
    first: Value,
    refs: _Parts,
    result: Ref,
    turned: Ref,
) -> None:
    """Compute the rows of `gate_gradient` from `first` on, as `_vector_rows` does."""
    del ctx
    chunks, _, heads = shape
    end = chunks * heads
    thread, first = thread_index(), first.registers.item()
    own, lane = divided(thread, LANES), remainder(thread, LANES)
    parts = refs.parts
    token, start = times(lane, VECTOR), times(smaller(add(first, own), end - 1), CHUNK)
    total = read(utils.memref_ptr(refs.b), start, 1, after=CHUNK - 1)[0]

    def load(ref: Ref) -> list[Value]:
        pointer, places = utils.memref_ptr(ref), [i * end * CHUNK for i in range(blocks)]
        loaded = [read(pointer, add(start, token), VECTOR, after=place) for place in places]
        return functools.reduce(sums, loaded)

    db_k, db_q, db_write, overlap = (
        load(ref) for ref in (parts.db_k, parts.db_q, parts.db_write, parts.overlap)
    )
    dg = _later_sums(lane, total, GateParts(db_q, db_k, overlap, db_write), scale)
    turned = utils.memref_ptr(turned)
    write(turned, add(times(own, PITCH), token), dg)
    utils.warpgroup_barrier()
    place, at, inside = _turned_place(first, thread, heads, end)
    result = utils.memref_ptr(result)
    with utils.when(inside):
        for i in range(0, CHUNK, STEP):
            write(result, at, read(turned, place, 1, after=i), after=i * heads)


def _later_sums(lane: Value, total: Value, parts: GateParts, scale: float) -> list[Value]:
    """The gradients of four gates, from the parts of these four tokens and the total `b_C`."""
    later = sums(parts.db_q, parts.db_k)
    for i in range(VECTOR - 2, -1, -1):
        later[i] = arith.addf(later[i], later[i + 1])
    kept, pairs = math.exp(total), zip(parts.overlap, parts.db_write, strict=True)
    last = functools.reduce(arith.addf, [math.fma(kept, x, y) for x, y in pairs])
    last = arith.mulf(last, constant(scale))
    block = later[0]
    for size in (1 << i for i in range(LANES.bit_length() - 1)):
        last = arith.addf(last, utils.shfl_bfly(last, size))
        other = utils.shfl_bfly(block, size)
        # Of neighbouring blocks of lanes the second comes after the first.
        after = arith.select(equal(bits_and(lane, size), 0), other, constant(0.0))
        later = [arith.addf(x, after) for x in later]
        block = arith.addf(block, other)
    return [arith.addf(x, last) for x in later]
