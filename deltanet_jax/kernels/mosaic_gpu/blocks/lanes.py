"""Work of single threads, for which Pallas, which has no threads, is too coarse.

Written against the layer below Pallas; the interpreter gets the same results from `jax.lax`.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.ptx import Fragments, Value, inline_ptx

__all__ = [
    "BLOCK",
    "WARP",
    "diagonal",
    "halves",
    "masked",
    "rest",
    "rounded",
    "store_rows",
    "thread_index",
    "widened",
    "zero",
]

BLOCK = 16
QUAD = 4  # lanes that share a row of a product
WARP = 32


def thread_index() -> Value:
    """The index of this thread, as an effect.

    Otherwise the compiler would hold what depends on it alone, such as the addresses of a
    substitution, in registers over a loop.
    """
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)


def zero(*, interpret: bool) -> jax.Array:
    """Return an opaque zero, which the compiler knows neither to be 0 nor to stay the same.

    Tile offsets are recomputed from it in each iteration of a loop. Otherwise the compiler would
    hoist their addresses into registers, and others would spill.
    """
    if interpret:
        return jnp.zeros((), jnp.int32)
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
    out: jax.Array = plgpu.inline_mgpu(return_type=result)(_zero)()
    return out


def _zero(ctx: object) -> Value:
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    value: Value = llvm.inline_asm(i32, [], "mov.u32 $0, 0;", "=r", has_side_effects=True)
    return fa.FragmentedArray.splat(value, (), is_signed=True)


def masked(
    x: jax.Array, holds: Callable[[Any, Any], Any] = operator.ge, *, interpret: bool
) -> jax.Array:
    """`[C, C]` float32 with zeros at the pairs `[i, j]` of tokens unless `holds(i, j)`.

    A mask of two index arrays would take about forty registers, which the compiler holds over a
    loop; here it is one number, and each register of `x` compares it with a constant.
    """
    if interpret:
        i, j = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in range(2))
        return jnp.where(holds(i, j), x, 0.0)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    body = functools.partial(_mask, holds=holds)
    out: jax.Array = plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(body)(x)
    return out


def diagonal(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Return the diagonal of `[C, C]` float32, over the rows."""
    return masked(x, operator.eq, interpret=interpret).sum(axis=1)


def _mask(ctx: object, x: Fragments, *, holds: Callable[[Any, Any], Any]) -> Fragments:
    """Register `[n, h]` of a thread has row `8 h` and columns `8 n`, `8 n + 1` after its first."""
    del ctx
    compare = arith.CmpIPredicate
    predicate = {operator.ge: compare.sge, operator.gt: compare.sgt, operator.eq: compare.eq}
    i32, zero = ir.IntegerType.get_signless(32), utils.c(0.0, ir.F32Type.get())
    thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
    warp = arith.remui(arith.divui(thread, utils.c(WARP, i32)), utils.c(CHUNK // BLOCK, i32))
    lane = arith.remui(thread, utils.c(WARP, i32))
    row = arith.addi(arith.muli(warp, utils.c(BLOCK, i32)), arith.divui(lane, utils.c(QUAD, i32)))
    column = arith.muli(arith.remui(lane, utils.c(QUAD, i32)), utils.c(2, i32))
    ahead = arith.subi(row, column)
    registers = x.registers.copy()
    flat = registers.reshape(-1, 2)
    for (block, half), register in np.ndenumerate(flat):
        entries = []
        for at in range(2):
            bound = utils.c(8 * block + at - 8 * half, i32)
            inside = arith.cmpi(predicate[holds], ahead, bound)
            entry = vector.extract(register, dynamic_position=[], static_position=[at])
            entries.append(arith.select(inside, entry, zero))
        flat[block, half] = vector.from_elements(register.type, entries)
    return type(x)(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)


def store_rows(
    tiles: Sequence[Ref], arrays: Sequence[jax.Array], *, lower: bool, interpret: bool
) -> None:
    """Store the lower or upper 32 rows of each 16-bit `[C, 32]` to a tile of 32 rows."""
    if interpret:
        half = CHUNK // 2
        for tile, x in zip(tiles, arrays, strict=True):
            tile[...] = x[half:] if lower else x[:half]
        return
    width = 2 * BLOCK
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)
    types = [(plgpu.RefType(transforms), plgpu.Layout.WGMMA) for _ in tiles]
    operands = zip(tiles, arrays, strict=True)
    body = functools.partial(_store_rows, lower=lower)
    plgpu.inline_mgpu(arg_types=types)(body)(*operands)


def _store_rows(ctx: object, *operands: tuple[Value, Fragments], lower: bool) -> None:
    """Store from two warps, by predicated instructions: a branch would cost registers all around.

    A lane has the address of eight values in one of its warp's 16 rows, of the first or second
    eight columns; of the next 16 columns it differs by one bit, swizzle or not.
    """
    del ctx
    i32 = ir.IntegerType.get_signless(32)

    def bits(value: Value, shift: int, mask: int) -> Value:
        return arith.andi(arith.shrui(value, utils.c(shift, i32)), utils.c(mask, i32))

    thread = thread_index()
    row = arith.ori(bits(thread, 0, BLOCK - 1), bits(thread, 1, BLOCK))
    part = arith.xori(bits(thread, 4, 1), bits(row, 1, 3))
    place = arith.ori(arith.shli(row, utils.c(6, i32)), arith.shli(part, utils.c(4, i32)))
    stores = arith.cmpi(arith.CmpIPredicate.eq, bits(thread, 6, 1), utils.c(int(lower), i32))
    instruction = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
    for tile, x in operands:
        base = llvm.ptrtoint(i32, utils.memref_ptr(tile))
        for at, registers in enumerate(x.registers.reshape(-1, 4)):
            address = arith.addi(base, arith.xori(place, utils.c(32 * at, i32)))
            words = [utils.bitcast(register, i32) for register in registers]
            inline_ptx(instruction, address, *words, predicate=stores, has_side_effects=True)


def halves(x: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 arrays whose sum is `x`, float32, to 16 bits of mantissa."""
    if interpret:
        high = x.astype(jnp.bfloat16)
        return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.bfloat16, layout=layout)
    inlined = plgpu.inline_mgpu(arg_types=(layout,), return_type=(result, result))
    high, low = inlined(_halve)(x)
    return high, low


def _halve(ctx: object, x: Fragments) -> tuple[Fragments, ...]:
    del ctx
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    high, low = np.empty_like(x.registers), np.empty_like(x.registers)
    for at, register in enumerate(x.registers.flat):
        numbers = [
            vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(2)
        ]
        words = rounded(numbers, "bf16"), rounded(rest(numbers), "bf16")
        for half, (word,) in zip((high, low), words, strict=True):
            half.flat[at] = utils.bitcast(word, pair)
    arrays = (type(x)(_registers=z, _layout=x.layout, _is_signed=None) for z in (high, low))
    return tuple(arrays)


def rounded(numbers: list[Value], kind: str) -> list[Value]:
    """Round pairs of values to words, one instruction each.

    Next to a cast back, a cast would be made one value at a time, at a quarter of the rate.
    """
    i32 = ir.IntegerType.get_signless(32)
    instruction = f"cvt.rn.{kind}x2.f32 $0, $2, $1;"
    return [
        llvm.inline_asm(i32, pair, instruction, "=r,f,f", has_side_effects=False)
        for pair in zip(numbers[::2], numbers[1::2], strict=True)
    ]


def rest(numbers: list[Value]) -> list[Value]:
    """Return the values minus their rounding to bfloat16."""
    wide = [x for word in rounded(numbers, "bf16") for x in _both(word)]
    return [arith.subf(x, y) for x, y in zip(numbers, wide, strict=True)]


def _both(word: Value) -> list[Value]:
    """Return the two bfloat16 values of a word as float32."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    both = arith.shli(word, utils.c(16, i32)), arith.andi(word, utils.c(-0x10000, i32))
    return [utils.bitcast(x, f32) for x in both]


def widened(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Convert 16-bit `x` to float32, from the words that hold two values.

    For bfloat16 in integers: next to a cast from float32 the cast back would make both go one
    value at a time, at a quarter of the rate.
    """
    if interpret or x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)
    out: jax.Array = plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(_widen)(x)
    return out


def _widen(ctx: object, x: Fragments) -> Fragments:
    del ctx
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), f32)
    wide = np.empty_like(x.registers)
    for at, register in enumerate(x.registers.flat):
        wide.flat[at] = vector.from_elements(pair, _both(utils.bitcast(register, i32)))
    return type(x)(_registers=wide, _layout=x.layout, _is_signed=None)
