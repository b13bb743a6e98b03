"""What a thread does on its own: work for which Pallas, which has no threads, is too coarse.

Written against the layer below Pallas; the interpreter gets the same results from `jax.lax`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["BLOCK", "block_inverses", "lower_triangle", "rounded", "widened"]

BLOCK = 16
VECTOR = 4  # floats in one access
WARP = 32


def block_inverses(x: jax.Array, scratch, *, interpret: bool) -> jax.Array:
    """`(I + x_i)^-1` of every block of 16 rows, by substitution, one row to a thread.

    As products these would be four dependent rounds through shared memory, each for a few
    operations; a warp does a block in some 160 instructions on its own.

    Args:
        x: Strictly lower triangular blocks, one below the other, `[C, 16]` float32.
        scratch: Shared memory, `[C, 16]` float32.
        interpret: Whether the interpreter runs this.

    Returns:
        The inverses, in the place of their blocks.
    """
    if interpret:
        blocks = x.reshape(-1, BLOCK, BLOCK)
        eye = jnp.broadcast_to(jnp.eye(BLOCK), blocks.shape)
        solved = jax.lax.linalg.triangular_solve(
            blocks, eye, left_side=True, lower=True, unit_diagonal=True
        )
        return solved.reshape(x.shape)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    inlined = plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)
    return inlined(_substitute)(x, scratch)


def _substitute(ctx, x, scratch):
    """A row `r` of the inverse solves `r (I + x) = e`: from the last column to the first.

    A warp holds all 16 rows of its block of `x`, and reads nothing that another warp wrote.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, math, vector

    del ctx
    f32, i32, index = ir.F32Type.get(), ir.IntegerType.get_signless(32), ir.IndexType.get()
    packed = ir.VectorType.get((VECTOR,), f32)
    x.store_untiled(scratch, optimized=False)
    utils.warp_barrier()
    thread = _thread()
    lane = arith.remui(thread, utils.c(BLOCK, i32))
    # Both halves of a warp solve the same rows; each stores half of the columns.
    warp = arith.remui(arith.divui(thread, utils.c(WARP, i32)), utils.c(4, i32))
    first = arith.index_cast(index, arith.muli(warp, utils.c(BLOCK, i32)))
    zero, one = utils.c(0.0, f32), utils.c(1.0, f32)

    def unit(j):
        own = arith.cmpi(arith.CmpIPredicate.eq, lane, utils.c(j, i32))
        return arith.select(own, one, zero)

    row = [unit(j) for j in range(BLOCK)]
    for i in range(BLOCK - 1, 0, -1):
        source = arith.addi(first, utils.c(i, index))
        factor = arith.negf(row[i])
        for j in range(0, i, VECTOR):
            loaded = vector.load(packed, scratch, [source, utils.c(j, index)])
            for at in range(min(VECTOR, i - j)):
                entry = vector.extract(loaded, dynamic_position=[], static_position=[at])
                row[j + at] = math.fma(factor, entry, row[j + at])
    utils.warp_barrier()
    target = arith.addi(first, arith.index_cast(index, lane))
    half = arith.remui(arith.divui(thread, utils.c(BLOCK, i32)), utils.c(2, i32))
    upper = arith.cmpi(arith.CmpIPredicate.eq, half, utils.c(1, i32))
    column = arith.muli(arith.index_cast(index, half), utils.c(BLOCK // 2, index))
    for j in range(0, BLOCK // 2, VECTOR):
        columns = range(j, j + VECTOR)
        value = [arith.select(upper, row[i + BLOCK // 2], row[i]) for i in columns]
        place = [target, arith.addi(column, utils.c(j, index))]
        vector.store(vector.from_elements(packed, value), scratch, place)
    utils.warp_barrier()
    return type(x).load_untiled(scratch, layout=x.layout, optimized=False)


def _thread():
    """The index of this thread, as an effect.

    Otherwise the compiler would hold what depends on it alone, such as all the unit vectors of
    a substitution, in registers over a loop.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)


def lower_triangle(x: jax.Array, *, strict: bool, interpret: bool) -> jax.Array:
    """`x`, `[C, C]` float32, and zeros above its diagonal; on it too if `strict`."""
    if interpret:
        return jnp.tril(x, -1 if strict else 0)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    body = functools.partial(_lower, strict=strict)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(body)(x)


def _lower(ctx, x, *, strict: bool):
    """Register `[n, h]` of a thread has row `8 h` and columns `8 n`, `8 n + 1` after its first."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    del ctx
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    thread = _thread()
    warp = arith.remui(arith.divui(thread, utils.c(WARP, i32)), utils.c(4, i32))
    lane = arith.remui(thread, utils.c(WARP, i32))
    row = arith.addi(arith.muli(warp, utils.c(BLOCK, i32)), arith.divui(lane, utils.c(VECTOR, i32)))
    column = arith.muli(arith.remui(lane, utils.c(VECTOR, i32)), utils.c(2, i32))
    ahead = arith.subi(row, column)
    registers = x.registers.copy()
    flat = registers.reshape(-1, 2)
    for (block, half), register in np.ndenumerate(flat):
        entries = []
        for at in range(2):
            least = 8 * block + at - 8 * half + strict
            inside = arith.cmpi(arith.CmpIPredicate.sge, ahead, utils.c(least, i32))
            entry = vector.extract(register, dynamic_position=[], static_position=[at])
            entries.append(arith.select(inside, entry, utils.c(0.0, f32)))
        flat[block, half] = vector.from_elements(register.type, entries)
    return type(x)(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)


def rounded(x: jax.Array, *, interpret: bool) -> jax.Array:
    """`x` in the precision of bfloat16, still as float32.

    In integers: the conversion of one number at a time, which a cast and its inverse become,
    takes four times as long as that of two.
    """
    if interpret:
        return x.astype(jnp.bfloat16).astype(jnp.float32)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(_round)(x)


def _round(ctx, x):
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    del ctx
    i32 = ir.IntegerType.get_signless(32)
    bits = x.bitcast(i32, output_is_signed=False)
    nearest = bits + utils.c(0x8000, i32)
    return (nearest & utils.c(-0x10000, i32)).bitcast(ir.F32Type.get())


def widened(x: jax.Array, *, interpret: bool) -> jax.Array:
    """16-bit `x` as float32, from the words that hold two numbers.

    For bfloat16 in integers: next to a cast from float32 the cast back would make both go one
    number at a time, at a quarter of the rate.
    """
    if interpret or x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(_widen)(x)


def _widen(ctx, x):
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    del ctx
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), f32)
    wide = np.empty_like(x.registers)
    for at, register in enumerate(x.registers.flat):
        word = utils.bitcast(register, i32)
        halves = arith.shli(word, utils.c(16, i32)), arith.andi(word, utils.c(-0x10000, i32))
        wide.flat[at] = vector.from_elements(pair, [utils.bitcast(z, f32) for z in halves])
    return type(x)(_registers=wide, _layout=x.layout, _is_signed=None)
