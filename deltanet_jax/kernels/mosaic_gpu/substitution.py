"""Inverses of blocks of 32 rows, by substitution in float32.

Of a strictly lower triangular `N` in blocks of 16 rows, `N = [[A, 0], [B, D]]`, the inverse of
`I - N` is `[[I + V, 0], [Y, I + W]]` with::

    V (I - A) = A        Z (I - A) = B        W (I - D) = D        Y = Z + W Z

One row to a lane: the warp of the upper block solves for the rows of `V` and of `Z`, which need
the same factors, and that of the lower block for `W`, in the same instructions. Then every lane of
the two computes four numbers of a row of `Y`. As products of 16-bit pairs these would be two rounds
through the tensor cores, with a fence before and a wait behind each.

Written against the layer below Pallas; the interpreter gets the same results from `jax.lax`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu.lanes import BLOCK, WARP, rest, rounded, thread_index
from deltanet_jax.kernels.mosaic_gpu.support import CHUNK

__all__ = ["PAIR", "scratch_shape", "store_inverses"]

PAIR = 2 * BLOCK  # rows of a block that is inverted here
ROW = PAIR + 4  # floats from row to row: lanes that access a row each meet no bank conflict
VECTOR = 4  # floats in one access
EIGHT = 8  # 16-bit numbers in one access
UPPER = 2 * PAIR * PAIR  # bytes of the upper rows of a tile
LAYOUT = plgpu.Layout.WGMMA
ONE = {"bf16": 0x3F80, "f16": 0x3C00}


def scratch_shape() -> tuple[int, int]:
    """Of the shared memory, float32, that the substitution takes."""
    return CHUNK, ROW


def store_inverses(x: jax.Array, scratch, results, low, *, interpret: bool) -> None:
    """Stores `(I - x_i)^-1` of both blocks of 32 rows, and what bfloat16 leaves over of them.

    All warps are to meet before they read it, and before they store to `scratch` again.

    Args:
        x: The blocks, one below the other, `[C, 32]` float32: strictly lower triangular, but
            for what the upper right quarters hold, which is not read.
        scratch: Shared memory of `scratch_shape`.
        results: Pairs of 16-bit tiles `[C, 32]`. The upper block goes to the upper rows of the
            first, the lower block to the lower rows of the second, above which zeros are stored;
            or of the first too, if the second is `None`.
        low: A bfloat16 tile `[C, 32]` for both blocks minus their rounding to bfloat16.
        interpret: Whether the interpreter runs this.
    """
    if interpret:
        _store_solved(x, results, low)
        return
    tile = plgpu.RefType((plgpu.TilingTransform((8, PAIR)), plgpu.SwizzleTransform(2 * PAIR)))
    arguments = LAYOUT, plgpu.RefType(), *jax.tree.map(lambda _: tile, (results, low))
    plgpu.inline_mgpu(arg_types=arguments)(_substitute)(x, scratch, results, low)


def _store_solved(x: jax.Array, results, low) -> None:
    blocks = jnp.tril(x.reshape(-1, PAIR, PAIR), -1)
    eye = jnp.broadcast_to(jnp.eye(PAIR), blocks.shape)
    solved = jax.lax.linalg.triangular_solve(
        -blocks, eye, left_side=True, lower=True, unit_diagonal=True
    ).reshape(x.shape)
    upper, lower = pl.ds(0, PAIR), pl.ds(PAIR, PAIR)
    for first, second in results:
        value = solved.astype(first.dtype)
        first[upper] = value[:PAIR]
        if second is None:
            first[lower] = value[PAIR:]
        else:
            second[...] = value.at[:PAIR].set(0.0)
    low[...] = (solved - solved.astype(low.dtype).astype(solved.dtype)).astype(low.dtype)


class _Place(NamedTuple):
    """Of a thread: what it accesses, in floats of the scratch memory and in bytes of a tile."""

    matrix: object  # its first number in the layout of a product
    solved: object  # its row of V, Z or W
    factors: object  # the block that its warp solves with
    weights: object  # a row of W, for four numbers of Y
    mixed: object  # these numbers of Z
    mixing: object  # and those of the first row of Z
    own: object  # eight numbers of V or W
    own_tile: object
    mixed_tile: object
    right_tile: object  # eight numbers right of V
    upper_tile: object  # a share of the upper rows
    diagonal: object  # the number on the diagonal, if it is among the eight
    on_diagonal: object  # whether it is
    upper: object  # whether the warp has the upper block of a pair
    first: object  # whether the warp has rows of the first pair


def _place() -> _Place:
    thread = thread_index()
    lane, warp = _and(thread, WARP - 1), _and(_shr(thread, 5), 3)
    odd, half, row = _and(warp, 1), _shr(lane, 4), _and(lane, BLOCK - 1)
    block, columns = _shl(warp, 4), _shl(odd, 4)
    pair = _and(block, PAIR)
    own, lower = _or(block, row), _or(_or(pair, BLOCK), row)
    # The warp above has a row of the pair to each lane, the one below a row of 16 to two.
    solved = _or(pair, _or(lane, columns))
    part = _or(_shl(odd, 1), half)  # of eight columns for V and W, of four for Y

    def floats(row, column):
        return _add(_times(row, ROW), column)

    def tile(chunk_row, part):
        turned = _xor(part, _and(_shr(row, 1), 3))  # the swizzle
        return _or(_shl(chunk_row, 6), _shl(turned, 4))

    own_tile = tile(own, part)
    return _Place(
        matrix=floats(_or(block, _shr(lane, 2)), _shl(_and(lane, 3), 1)),
        solved=floats(solved, columns),
        factors=floats(block, columns),
        weights=floats(lower, _c(BLOCK)),
        mixed=floats(lower, _shl(part, 2)),
        mixing=floats(_or(pair, BLOCK), _shl(part, 2)),
        own=floats(own, _shl(part, 3)),
        own_tile=own_tile,
        mixed_tile=_or(tile(lower, odd), _shl(half, 3)),
        right_tile=tile(own, _or(part, 2)),
        upper_tile=_shl(_and(thread, 2 * WARP - 1), 4),
        diagonal=_add(own_tile, _shl(_and(row, EIGHT - 1), 1)),
        on_diagonal=_equal(half, _shr(row, 3)),
        upper=_equal(odd, 0),
        first=_equal(_shr(warp, 1), 0),
    )


def _substitute(ctx, x, scratch, results, low):
    from jax.experimental.mosaic.gpu import utils

    del ctx
    place, scratch = _place(), utils.memref_ptr(scratch)
    # Register `[n, h]` of a thread has row `8 h` and columns `8 n`, `8 n + 1` after its first.
    for at, register in enumerate(x.registers.flat):
        _write(scratch, place.matrix, register, 8 * (at // 2) + 8 * ROW * (at % 2))
    utils.warpgroup_barrier()
    row = _read(scratch, place.solved, BLOCK)
    for i in range(BLOCK - 1, 0, -1):
        factors = _read(scratch, place.factors, i, after=i * ROW)
        row[:i] = _plus_multiple(row[:i], row[i], factors)
    # Only this warp reads its factors, in the place of some of these rows.
    utils.warp_barrier()
    for at in range(0, BLOCK, VECTOR):
        _write(scratch, place.solved, _packed(row[at : at + VECTOR]), at)
    utils.warpgroup_barrier()
    weights = _read(scratch, place.weights, BLOCK)
    mixed = _read(scratch, place.mixed, VECTOR)
    for k in range(BLOCK - 1):  # the last column of W is zero
        y = _read(scratch, place.mixing, VECTOR, after=k * ROW)
        mixed = _plus_multiple(mixed, weights[k], y)
    own = _read(scratch, place.own, EIGHT)
    for first, second in results:
        _store_result(place, first, second, own, mixed)
    _store_rest(place, low, own, mixed)


def _store_result(place: _Place, first, second, own: list, mixed: list) -> None:
    """The rounded numbers of V or W and of Y, the ones and the zeros."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    kind = str(ir.MemRefType(first.type).element_type)
    tile = utils.memref_ptr(first)
    if second is not None:
        second = utils.memref_ptr(second)
        with utils.when(place.first):
            for at in range(0, UPPER, UPPER // 2):
                _write(second, place.upper_tile, _zeros(), at)
        tile = arith.select(place.first, tile, second)
    _write(tile, place.own_tile, _packed(rounded(own, kind)))
    with utils.when(place.on_diagonal):
        one = utils.c(ONE[kind], ir.IntegerType.get_signless(16))
        _write(tile, place.diagonal, one)
    _write(tile, place.mixed_tile, _packed(rounded(mixed, kind)))
    with utils.when(place.upper):
        _write(tile, place.right_tile, _zeros())


def _store_rest(place: _Place, low, own: list, mixed: list) -> None:
    """What rounding to bfloat16 leaves over, which is nothing of the ones."""
    from jax.experimental.mosaic.gpu import utils

    tile = utils.memref_ptr(low)
    _write(tile, place.own_tile, _packed(rounded(rest(own), "bf16")))
    _write(tile, place.mixed_tile, _packed(rounded(rest(mixed), "bf16")))
    with utils.when(place.upper):
        _write(tile, place.right_tile, _zeros())


def _plus_multiple(x: list, factor, y: list) -> list:
    from jaxlib.mlir.dialects import math

    return [math.fma(factor, b, a) for a, b in zip(x, y, strict=True)]


def _read(pointer, first, count: int, after: int = 0) -> list:
    """`count` floats from `first + after` on."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    f32 = ir.F32Type.get()
    packed = ir.VectorType.get((VECTOR,), f32)
    pointer = utils.getelementptr(pointer, [first], f32)
    numbers = []
    for at in range(0, count, VECTOR):
        loaded = llvm.load(packed, utils.getelementptr(pointer, [after + at], f32))
        numbers += [
            vector.extract(loaded, dynamic_position=[], static_position=[i])
            for i in range(min(VECTOR, count - at))
        ]
    return numbers


def _write(pointer, first, value, after: int = 0) -> None:
    """Stores floats at `first + after` floats, anything else at `first + after` bytes."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    kind = value.type.element_type if isinstance(value.type, ir.VectorType) else value.type
    unit = kind if isinstance(kind, ir.F32Type) else ir.IntegerType.get_signless(8)
    pointer = utils.getelementptr(pointer, [first], unit)
    llvm.store(value, utils.getelementptr(pointer, [after], unit))


def _packed(values: list):
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    kind = ir.VectorType.get((len(values),), values[0].type)
    return vector.from_elements(kind, values)


def _zeros():
    return _packed([_c(0)] * 4)


def _c(value: int):
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    return utils.c(value, ir.IntegerType.get_signless(32))


def _integers(operation: str, x, y):
    from jaxlib.mlir.dialects import arith

    return getattr(arith, operation)(x, _c(y) if isinstance(y, int) else y)


_add = functools.partial(_integers, "addi")
_times = functools.partial(_integers, "muli")
_and = functools.partial(_integers, "andi")
_or = functools.partial(_integers, "ori")
_xor = functools.partial(_integers, "xori")
_shl = functools.partial(_integers, "shli")
_shr = functools.partial(_integers, "shrui")


def _equal(x, y: int):
    from jaxlib.mlir.dialects import arith

    return arith.cmpi(arith.CmpIPredicate.eq, x, _c(y) if isinstance(y, int) else y)
