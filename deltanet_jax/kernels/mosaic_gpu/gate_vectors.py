"""The vectors of a scalar gate in every chunk, and its gradient.

Of gates raised to `LOWEST_GATE` at least, heads before tokens::

    b_i = g_1 + ... + g_i        decay = exp(b)        rest = exp(b_C - b)

A thread block makes some rows, each of one head in one chunk. On one side memory is contiguous over
the heads, on the other over the tokens, so it is turned in shared memory; for the rest the threads
of a row are neighbours in a warp. A thread has all its loads in flight and no loop: XLA would take
five kernels for the vectors and as many for the gradient, each with little to do.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, launches
from deltanet_jax.kernels.mosaic_gpu.blocks.lanes import thread_index
from deltanet_jax.kernels.mosaic_gpu.blocks.ptx import (
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

__all__ = ["gate_gradient", "gate_vectors"]

ROWS = 8  # of a thread block: as many heads as fill what the memory gives at once, 32 bytes
VECTOR = 4  # tokens of a thread
LANES = CHUNK // VECTOR  # of a row
STEP = LANES  # tokens from one access of a thread to the next, on the side of the heads
PITCH = CHUNK + VECTOR  # from row to row in shared memory: neither access meets a bank conflict


def _launch(name: str, by_thread, plain, inputs: dict, outputs: dict, turned, interpret) -> dict:
    """Run `by_thread(first row, inputs, outputs, turned)` for some rows in every thread block.

    Args:
        name: Name of the kernel in profiles.
        by_thread: Work of a thread.
        plain: `(inputs, outputs)`, the same for the interpreter, of all rows.
        inputs: Arrays by name.
        outputs: Shapes by name.
        turned: Names of what passes through shared memory.
        interpret: Interpreter parameters, or `None` for the device.
    """
    rows = next(iter(outputs.values())).size // CHUNK

    def body(*args):
        *refs, scratch = args
        sources = dict(zip(inputs, refs[: len(inputs)], strict=True))
        results = dict(zip(outputs, refs[len(inputs) :], strict=True))
        if interpret is not None:
            plain(sources, results)
            return
        first = lax.axis_index("program") * ROWS
        types = jax.tree.map(lambda _: plgpu.RefType(), (sources, results, scratch))
        inlined = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), *types))
        inlined(by_thread)(first, sources, results, scratch)

    kernel = plgpu.kernel(
        launches.named(name, body),
        out_type=tuple(outputs.values()),
        scratch_types=(dict.fromkeys(turned, plgpu.SMEM((ROWS, PITCH), jnp.float32)),),
        grid=(1 if interpret else pl.cdiv(rows, ROWS),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return dict(zip(outputs, kernel(*inputs.values()), strict=True))


def _plain_vectors(inputs: dict, results: dict) -> None:
    x = {name: jnp.swapaxes(ref[...], 1, 2) for name, ref in inputs.items()}
    b = jnp.cumsum(jnp.maximum(x.pop("g"), LOWEST_GATE), axis=-1)
    x |= {"b": b, "decay": jnp.exp(b), "rest": jnp.exp(b[..., -1:] - b)}
    for name, y in x.items():
        results[name][...] = y


def _turned_place(first, thread, heads: int, end: int):
    """Return offsets of a thread's first value in shared and device memory, on the heads' side.

    And whether its row exists; for rows past the last one, that one is read.
    """
    own, token = remainder(thread, ROWS), divided(thread, ROWS)
    row = add(first, own)
    kept = smaller(row, end - 1)
    at = add(times(divided(kept, heads), CHUNK * heads), remainder(kept, heads))
    return add(times(own, PITCH), token), add(at, times(token, heads)), less(row, end)


def _vector_rows(shape: tuple[int, int, int], ctx, first, inputs, results, turned) -> None:
    """The rows from `first` on; those past the last one are computed but not stored."""
    from jax.experimental.mosaic.gpu import utils

    del ctx
    chunks, _, heads = shape
    thread, first = thread_index(), first.registers.item()
    place, at, _ = _turned_place(first, thread, heads, chunks * heads)
    loaded = {}
    for name, ref in inputs.items():
        source = utils.memref_ptr(ref)
        loaded[name] = [read(source, at, 1, after=i * heads) for i in range(0, CHUNK, STEP)]
    turned = {name: utils.memref_ptr(ref) for name, ref in turned.items()}
    for name, numbers in loaded.items():
        for i, x in enumerate(numbers):
            write(turned[name], place, x, after=i * STEP)
    utils.warpgroup_barrier()
    own, lane = divided(thread, LANES), remainder(thread, LANES)
    token, row = times(lane, VECTOR), add(first, own)
    x = {name: read(ref, add(times(own, PITCH), token), VECTOR) for name, ref in turned.items()}
    x |= _exponentials(lane, x.pop("g"))
    with utils.when(less(row, chunks * heads)):
        for name, numbers in x.items():
            write(utils.memref_ptr(results[name]), add(times(row, CHUNK), token), numbers)


def _exponentials(lane, g: list) -> dict[str, list]:
    """`b` and what the kernels read of it, of four tokens."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import arith, math

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
    shape = (batch * tokens // CHUNK, CHUNK, heads)
    inputs = {"g": g} | ({} if beta is None else {"beta": beta})
    inputs = {name: x.reshape(shape) for name, x in inputs.items()}
    names = ("b", "decay", "rest", "beta")[: 2 + len(inputs)]
    row = jax.ShapeDtypeStruct((shape[0], heads, CHUNK), jnp.float32)
    out = _launch(
        "gate_vectors", functools.partial(_vector_rows, shape), _plain_vectors,
        inputs, dict.fromkeys(names, row), tuple(inputs), interpret,
    )  # fmt: skip
    return {name: x.reshape(batch, -1, heads, CHUNK) for name, x in out.items()}


def gate_gradient(parts: dict, b: jax.Array, *, scale: float, interpret=None) -> jax.Array:
    """The gradient of `g`: the sum of that of `b` over a token and the later ones of its chunk.

    Args:
        parts: Parts of the gradient of `b`, `[M, B, N, HV, C]` float32 each, to be summed over M.
            `db_q` and `db_k` belong to the tokens; `overlap`, times `scale exp(b_C)`, and
            `db_write`, times `scale`, to the last one, whichever row they are in.
        b: `[B, N, HV, C]` float32.
        scale: Factor on `q`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `[B, T, HV]` float32.
    """
    batch, chunks, heads, _ = b.shape
    shape = batch * chunks, CHUNK, heads
    blocks = parts["db_q"].shape[0]
    out = {"dg": jax.ShapeDtypeStruct(shape, jnp.float32)}
    by_thread = functools.partial(_gradient_rows, shape, blocks, scale)
    plain = functools.partial(_plain_gradient, scale)
    out = _launch("gate_gradient", by_thread, plain, {"b": b} | parts, out, ("dg",), interpret)
    return out["dg"].reshape(batch, chunks * CHUNK, heads)


def _plain_gradient(scale: float, refs: dict, results: dict) -> None:
    x = {name: ref[...] for name, ref in refs.items()}
    last = scale * (jnp.exp(x["b"][..., -1:]) * x["overlap"] + x["db_write"]).sum((0, -1))
    db = (x["db_q"] + x["db_k"]).sum(0).at[..., -1].add(last)
    dg = lax.cumsum(db, axis=3, reverse=True)
    results["dg"][...] = jnp.swapaxes(dg.reshape(-1, *dg.shape[2:]), 1, 2)


def _gradient_rows(shape, blocks: int, scale: float, ctx, first, refs, results, turned) -> None:
    """Compute the rows of `gate_gradient` from `first` on, as `_vector_rows` does."""
    from jax.experimental.mosaic.gpu import utils

    del ctx
    chunks, _, heads = shape
    end = chunks * heads
    thread, first = thread_index(), first.registers.item()
    own, lane = divided(thread, LANES), remainder(thread, LANES)
    token, start = times(lane, VECTOR), times(smaller(add(first, own), end - 1), CHUNK)
    refs = {name: utils.memref_ptr(ref) for name, ref in refs.items()}
    total = read(refs.pop("b"), start, 1, after=CHUNK - 1)[0]
    parts = {}
    for name, ref in refs.items():
        places = [i * end * CHUNK for i in range(blocks)]
        loaded = [read(ref, add(start, token), VECTOR, after=place) for place in places]
        parts[name] = functools.reduce(sums, loaded)
    dg = _later_sums(lane, total, parts, scale)
    turned = utils.memref_ptr(turned["dg"])
    write(turned, add(times(own, PITCH), token), dg)
    utils.warpgroup_barrier()
    place, at, inside = _turned_place(first, thread, heads, end)
    result = utils.memref_ptr(results["dg"])
    with utils.when(inside):
        for i in range(0, CHUNK, STEP):
            write(result, at, read(turned, place, 1, after=i), after=i * heads)


def _later_sums(lane, total, parts: dict[str, list], scale: float) -> list:
    """The gradients of four gates, from the parts of these four tokens and the total `b_C`."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import arith, math

    later = sums(parts["db_q"], parts["db_k"])
    for i in range(VECTOR - 2, -1, -1):
        later[i] = arith.addf(later[i], later[i + 1])
    kept, pairs = math.exp(total), zip(parts["overlap"], parts["db_write"], strict=True)
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
