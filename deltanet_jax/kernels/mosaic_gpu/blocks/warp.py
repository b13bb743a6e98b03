"""Rows of one warp, which its threads exchange and multiply without a barrier between warps.

A warp holds 16 rows of an operand of 64 rows in registers, which are already the operands of
its own matrix instructions. So products within blocks of 16 rows never touch shared memory.
Written against the layer below Pallas; the interpreter gets the same results from `jax.numpy`.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK
from deltanet_jax.kernels.mosaic_gpu.blocks.lanes import BLOCK, WARP
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.ptx import Fragments, Value

__all__ = [
    "apply_blocks",
    "block_products",
    "exchange_shape",
    "exchanged",
    "odd_rows",
    "other_rows",
    "other_rows_shape",
    "other_triangle",
    "store_row",
]

LAYOUT = plgpu.Layout.WGMMA
EIGHT = 8  # rows and columns of one register of a warp


def exchange_shape(width: int, *, uniform: bool) -> tuple[int, int, int]:
    """Return the shape of the shared memory, float32, in which warps exchange `[C, width]`."""
    return (2, CHUNK // BLOCK, width) if uniform else (2, width // 4, 4 * CHUNK)


def exchanged(
    x: jax.Array, size: int, scratch: Ref, *, uniform: bool, interpret: bool
) -> jax.Array:
    """Row `i` of the result is row `i ^ size` of `x`, `[C, S]` float32.

    Args:
        x: The rows.
        size: A power of two below C.
        scratch: Shared memory of `exchange_shape`, for sizes of at least 16, which
            alternate between its two parts: the barrier of one frees the part of the other.
        uniform: Whether the 16 rows of a warp are equal.
        interpret: Whether the interpreter runs this.
    """
    if interpret:
        rows = x.reshape(-1, 2, size, x.shape[1])
        return jnp.concatenate((rows[:, 1:], rows[:, :1]), axis=1).reshape(x.shape)
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LAYOUT)
    if size < BLOCK:
        body = functools.partial(_exchange_in_warp, size=size)
        moved: jax.Array = plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)(body)(x)
        return moved
    body = functools.partial(_exchange_warps, warps=size // BLOCK, uniform=uniform)
    inlined = plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()), return_type=result)
    out: jax.Array = inlined(body)(x, scratch)
    return out


def _registers(x: Fragments) -> Any:
    """Index registers by block of eight columns, and half of the rows of the warp."""
    return x.registers.reshape(-1, 2)


def _with_registers(x: Fragments, registers: Any) -> Fragments:
    registers = registers.reshape(x.registers.shape)
    return type(x)(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)


def _exchange_in_warp(ctx: object, x: Fragments, *, size: int) -> Fragments:
    del ctx
    registers = _registers(x)
    if size == EIGHT:
        return _with_registers(x, registers[:, ::-1])
    moved = registers.copy()
    for at, register in enumerate(registers.flat):
        moved.flat[at] = utils.shfl_bfly(register, 4 * size)
    return _with_registers(x, moved)


def _exchange_warps(
    ctx: object, x: Fragments, scratch: Value, *, warps: int, uniform: bool
) -> Fragments:
    del ctx
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    registers = _registers(x)
    thread = arith.remui(utils.thread_idx(), utils.c(CHUNK * 2, i32))
    other = arith.xori(thread, utils.c(WARP * warps, i32))
    half = utils.c(warps - 1, index)

    def place(thread: Value, at: int) -> list[Value]:
        if not uniform:
            column = arith.muli(thread, utils.c(2, i32))
            return [half, utils.c(at, index), arith.index_cast(index, column)]
        warp = arith.divui(thread, utils.c(WARP, i32))
        column = arith.muli(arith.remui(thread, utils.c(4, i32)), utils.c(2, i32))
        column = arith.addi(column, utils.c(EIGHT * (at // 2), i32))
        return [half, arith.index_cast(index, warp), arith.index_cast(index, column)]

    step = 2 if uniform else 1
    for at in range(0, registers.size, step):
        vector.store(registers.flat[at], scratch, place(thread, at))
    utils.warpgroup_barrier()
    moved = registers.copy()
    for at in range(0, registers.size, step):
        loaded = vector.load(registers.flat[at].type, scratch, place(other, at))
        for same in range(at, at + step):
            moved.flat[same] = loaded
    return _with_registers(x, moved)


def store_row(ref: Ref, x: jax.Array, *, interpret: bool) -> None:
    """Store any row of `x`, `[C, S]` float32, whose rows are equal."""
    if interpret:
        ref[...] = x[0]
    else:
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))(_store_row)(ref, x)


def _store_row(ctx: object, ref: Value, x: Fragments) -> None:
    del ctx
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    column = arith.muli(arith.remui(utils.thread_idx(), utils.c(4, i32)), utils.c(2, i32))
    for at, (register, _) in enumerate(_registers(x)):
        place = arith.addi(column, utils.c(EIGHT * at, i32))
        vector.store(register, ref, [arith.index_cast(index, place)])


def other_rows_shape(width: int) -> tuple[int, int]:
    """Return the shape of the int32 shared memory that `other_rows` of `[C, width]` uses."""
    return width // BLOCK, 4 * 2 * CHUNK


def other_rows(
    x: jax.Array, sizes: Sequence[int], scratch: Ref, *, interpret: bool
) -> list[jax.Array]:
    """For every size, multiples of 16: row `i ^ size` of 16-bit `x`, `[C, S]`, for row `i`.

    Between two calls all warps are to meet at another barrier.
    """
    if interpret:
        return [_flipped(x, size) for size in sizes]
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LAYOUT)
    inlined = plgpu.inline_mgpu(
        arg_types=(LAYOUT, plgpu.RefType()), return_type=[result] * len(sizes)
    )
    return list(inlined(functools.partial(_other_rows, sizes=sizes))(x, scratch))


def _flipped(x: jax.Array, size: int) -> jax.Array:
    for bit in (BLOCK, 2 * BLOCK):
        if size & bit:
            rows = x.reshape(-1, 2, bit, x.shape[1])
            x = jnp.concatenate((rows[:, 1:], rows[:, :1]), axis=1).reshape(x.shape)
    return x


def _other_rows(
    ctx: object, x: Fragments, scratch: Value, *, sizes: Sequence[int]
) -> list[Fragments]:
    del ctx
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    packed = ir.VectorType.get((4,), i32)
    registers = _registers(x)
    words = [_as_word(register) for register in registers.flat]
    thread = arith.remui(utils.thread_idx(), utils.c(CHUNK * 2, i32))

    def place(thread: Value, at: int) -> list[Value]:
        column = arith.muli(thread, utils.c(4, i32))
        return [utils.c(at, index), arith.index_cast(index, column)]

    rows = range(len(words) // 4)
    for at in rows:
        value = vector.from_elements(packed, words[4 * at : 4 * at + 4])
        vector.store(value, scratch, place(thread, at))
    utils.warpgroup_barrier()
    results = []
    for size in sizes:
        other = arith.xori(thread, utils.c(size // BLOCK * WARP, i32))
        moved = registers.copy()
        for at in rows:
            loaded = vector.load(packed, scratch, place(other, at))
            for i in range(4):
                word = vector.extract(loaded, dynamic_position=[], static_position=[i])
                moved.flat[4 * at + i] = utils.bitcast(word, registers.flat[0].type)
        results.append(_with_registers(x, moved))
    return results


def odd_rows(x: jax.Array, y: jax.Array | None, size: int, *, interpret: bool) -> jax.Array:
    """Rows `i` of 16-bit `x` where `i & size`; elsewhere those of `y`, or zeros.

    For a size of at least 16.
    """
    if interpret:
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where((row & size) != 0, x, jnp.zeros_like(x) if y is None else y)
    operands = (x,) if y is None else (x, y)
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LAYOUT)
    body = functools.partial(_odd_rows, warps=size // BLOCK)
    inlined = plgpu.inline_mgpu(arg_types=(LAYOUT,) * len(operands), return_type=result)
    out: jax.Array = inlined(body)(*operands)
    return out


def _odd_rows(ctx: object, x: Fragments, y: Fragments | None = None, *, warps: int) -> Fragments:
    """Choose words: 16-bit values would be chosen one by one."""
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    bit = arith.andi(utils.thread_idx(), utils.c(WARP * warps, i32))
    odd = arith.cmpi(arith.CmpIPredicate.ne, bit, utils.c(0, i32))
    chosen = x.registers.copy()
    for at, a in enumerate(x.registers.flat):
        other = utils.c(0, i32) if y is None else _as_word(y.registers.flat[at])
        chosen.flat[at] = utils.bitcast(arith.select(odd, _as_word(a), other), a.type)
    return _with_registers(x, chosen)


def other_triangle(x: jax.Array, size: int, scratch: Ref, *, interpret: bool) -> jax.Array:
    """For row `i`, block `i ^ size` of 16 rows of `x`, transposed; `[C, 16]` float32.

    Takes `[C, 16]` float32 of shared memory; all warps are to meet before its next use.
    """
    if interpret:
        blocks = _flipped(x, size).reshape(-1, BLOCK, BLOCK)
        return blocks.transpose(0, 2, 1).reshape(x.shape)
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LAYOUT)
    inlined = plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()), return_type=result)
    body = functools.partial(_other_triangle, warps=size // BLOCK)
    out: jax.Array = inlined(body)(x, scratch)
    return out


def _other_triangle(ctx: object, x: Fragments, scratch: Value, *, warps: int) -> Fragments:
    del ctx
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    x.store_untiled(scratch, optimized=False)
    utils.warpgroup_barrier()
    thread = utils.thread_idx()
    warp = arith.remui(arith.divui(thread, utils.c(WARP, i32)), utils.c(4, i32))
    other = arith.muli(arith.xori(warp, utils.c(warps, i32)), utils.c(BLOCK, i32))
    lane = arith.remui(thread, utils.c(WARP, i32))
    row = arith.divui(lane, utils.c(4, i32))
    column = arith.addi(other, arith.muli(arith.remui(lane, utils.c(4, i32)), utils.c(2, i32)))
    registers = _registers(x)
    moved = registers.copy()
    for at in range(len(registers)):
        for half in range(2):
            source_column = arith.addi(row, utils.c(EIGHT * half, i32))
            pair = []
            for i in range(2):
                source_row = arith.addi(column, utils.c(EIGHT * at + i, i32))
                place = [arith.index_cast(index, z) for z in (source_row, source_column)]
                pair.append(memref.load(scratch, place))
            moved[at, half] = vector.from_elements(registers[at, half].type, pair)
    return _with_registers(x, moved)


def block_products(
    x: jax.Array, y: jax.Array, init: jax.Array | None = None, *, interpret: bool
) -> jax.Array:
    """`x y^T` within blocks of 16 rows, `[C, 16]` float32, of 16-bit `[C, S]`; plus `init`."""
    if interpret:
        x, y = (z.reshape(-1, BLOCK, z.shape[1]) for z in (x, y))
        out = jnp.einsum("bik,bjk->bij", x, y, preferred_element_type=jnp.float32)
        return out.reshape(CHUNK, BLOCK) + (0.0 if init is None else init)
    operands = (x, y) if init is None else (x, y, init)
    result = plgpu.ShapeDtypeStruct((CHUNK, BLOCK), jnp.float32, layout=LAYOUT)
    inlined = plgpu.inline_mgpu(arg_types=(LAYOUT,) * len(operands), return_type=result)
    products: jax.Array = inlined(_products)(*operands)
    return products


def _products(ctx: object, x: Fragments, y: Fragments, init: Fragments | None = None) -> Fragments:
    """A register of the right operand holds columns of eight rows: rows of `y`, as it is."""
    del ctx
    x_registers, y_registers = _registers(x), _registers(y)
    sums: list[list[Value] | None] = [None, None]
    if init is not None:

        def entry(register: Value, at: int) -> Value:
            return vector.extract(register, dynamic_position=[], static_position=[at])

        sums = [[entry(r, at) for r in pair for at in range(2)] for pair in _registers(init)]
    for at in range(0, len(x_registers), 2):
        left = [*x_registers[at], *x_registers[at + 1]]
        for half in range(2):
            right = [y_registers[at, half], y_registers[at + 1, half]]
            sums[half] = _multiply_add(x, left, right, sums[half])
    return _accumulated(x, sums, BLOCK)


def apply_blocks(*terms: tuple[jax.Array, jax.Array, bool], interpret: bool) -> jax.Array:
    """The sum of `w y`, or of `w^T y`, within blocks of 16 rows, `[C, S]` float32.

    Args:
        *terms: 16-bit weights, one block of 16 columns for each block of rows, `[C, 16]`; the
            right operand `[C, S]`; whether the blocks of weights are to be transposed.
        interpret: Whether the interpreter runs this.
    """
    flags = tuple(transpose for *_, transpose in terms)
    if interpret:
        return functools.reduce(operator.add, (_applied(*term) for term in terms))
    operands = [x for *pair, _ in terms for x in pair]
    result = plgpu.ShapeDtypeStruct(operands[1].shape, jnp.float32, layout=LAYOUT)
    body = functools.partial(_apply, flags)
    inlined = plgpu.inline_mgpu(arg_types=(LAYOUT,) * len(operands), return_type=result)
    out: jax.Array = inlined(body)(*operands)
    return out


def _applied(weights: jax.Array, y: jax.Array, transpose: bool) -> jax.Array:
    weights, blocks = (z.reshape(-1, BLOCK, z.shape[1]) for z in (weights, y))
    equation = "bji,bjk->bik" if transpose else "bij,bjk->bik"
    out = jnp.einsum(equation, weights, blocks, preferred_element_type=jnp.float32)
    return out.reshape(y.shape)


def _apply(flags: tuple[bool, ...], ctx: object, *operands: Fragments) -> Fragments:
    del ctx
    y = operands[1]
    sums: list[list[Value] | None] = [None] * len(_registers(y))
    for weights, y, transpose in zip(operands[::2], operands[1::2], flags, strict=True):
        w = _registers(weights)
        if transpose:
            left = [_transposed(z) for z in (w[0, 0], w[1, 0], w[0, 1], w[1, 1])]
        else:
            left = [*w[0], *w[1]]
        for at, register in enumerate(_registers(y)):
            right = [_transposed(z) for z in register]
            sums[at] = _multiply_add(y, left, right, sums[at])
    return _accumulated(y, sums, y.shape[1])


def _as_word(register: Value) -> Value:
    return utils.bitcast(register, ir.IntegerType.get_signless(32))


def _transposed(register: Value) -> Value:
    """Transpose eight rows and columns of a warp."""
    i32 = ir.IntegerType.get_signless(32)
    instruction = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return llvm.inline_asm(i32, [_as_word(register)], instruction, "=r,r", has_side_effects=False)


def _multiply_add(
    like: Fragments, left: list[Value], right: list[Value], sums: list[Value] | None
) -> list[Value]:
    """`sums + left right` of 16 x 16 times 16 x 8, four values to a thread."""
    f32 = ir.F32Type.get()
    kind = str(like.mlir_dtype)
    if sums is None:
        sums = [utils.c(0.0, f32)] * 4
    words = [*left, *right]
    words = [z if isinstance(z.type, ir.IntegerType) else _as_word(z) for z in words]
    instruction = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    result = llvm.StructType.get_literal([f32] * 4)
    operands = [*words, *sums]
    out: Value = llvm.inline_asm(result, operands, instruction, constraints, has_side_effects=False)
    return [llvm.extractvalue(f32, out, [at]) for at in range(4)]


def _accumulated(like: Fragments, sums: list[Any], width: int) -> Fragments:
    """The array `[C, width]` whose blocks of eight columns a warp summed."""
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    registers = np.empty((len(sums), 2), dtype=object)
    for at, values in enumerate(sums):
        for half in range(2):
            registers[at, half] = vector.from_elements(pair, values[2 * half : 2 * half + 2])
    shape = like.layout.registers_shape((CHUNK, width))
    return type(like)(_registers=registers.reshape(shape), _layout=like.layout, _is_signed=None)
