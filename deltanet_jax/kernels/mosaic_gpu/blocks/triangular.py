"""Inverses of blocks of 32 rows in float32, half a warpgroup to each.

Of a strictly lower triangular `N`, in two blocks of rows, `N = [[A, 0], [B, D]]`, the inverse of
`I - N` is `[[I + V, 0], [Y, I + W]]` with::

    V (I - A) = A        W (I - D) = D        Q = B + W B        Y = Q + Q V

Blocks of 8 rows are substituted, a row to a lane. Those of 16 and of 32 follow by matrix
instructions of one warp, three products in tf32 for one in float32. What they multiply from the
left is in the registers that hold a result; from the right it is read across the rows, from shared
memory, where eight columns lie in the order 0 2 4 6 1 3 5 7: so `stmatrix` and `ldmatrix`, made for
pairs of 16-bit values, move float32.

Few accesses are the point: those to shared memory, and not products or waits, are what bounds the
inverse (`docs/notebook.md`).

Written against the layer below Pallas; the interpreter gets the same results from `jax.lax`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK
from deltanet_jax.kernels.mosaic_gpu.blocks.lanes import BLOCK, WARP, thread_index
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.ptx import (
    Fragments,
    Value,
    add,
    address_of,
    bits_and,
    bits_or,
    constant,
    equal,
    greater,
    inline_ptx,
    integer,
    not_equal,
    numbers_of,
    packed,
    read,
    shifted_left,
    shifted_right,
    sums,
    times,
    write,
)

__all__ = ["PAIR", "inverses", "scratch_shape"]

PAIR = 2 * BLOCK  # rows of a block that is inverted here
ROW = PAIR + 4  # floats from row to row: lanes that access a row each meet no bank conflict
EIGHT = 8
VECTOR = 4  # floats in one access
LAYOUT = plgpu.Layout.WGMMA


def scratch_shape() -> tuple[int, int]:
    """Return the shape of the shared memory, float32, that the inverses take."""
    return CHUNK, ROW


def inverses(x: jax.Array, scratch: Ref, *, interpret: bool) -> jax.Array:
    """`(I - x_i)^-1` of both blocks of 32 rows, `[C, 32]` float32.

    All warps are to meet before they come here again.

    Args:
        x: The blocks, one below the other, `[C, 32]` float32; of what is not strictly below the
            diagonal nothing is read.
        scratch: Shared memory of `scratch_shape`.
        interpret: Whether the interpreter runs this.
    """
    if interpret:
        blocks = jnp.tril(x.reshape(-1, PAIR, PAIR), -1)
        eye = jnp.broadcast_to(jnp.eye(PAIR), blocks.shape)
        return jax.lax.linalg.triangular_solve(
            -blocks, eye, left_side=True, lower=True, unit_diagonal=True
        ).reshape(x.shape)
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LAYOUT)
    inlined = plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()), return_type=result)
    out: jax.Array = inlined(_invert)(x, scratch)
    return out


class _Place(NamedTuple):
    """Offsets of a thread in the scratch memory, in floats, and the values that it holds."""

    matrix: Value  # its row of the four that `stmatrix` stores, of two times 8 x 8
    square: Value  # its row of what `ldmatrix` loads, of two on the diagonal
    solved: Value  # the eight values that it solves for
    factors: Value  # the block that they are solved with
    column: Value  # two rows below one another, in a column of the warp's block
    above: Value  # the same of the block above in the pair
    row: Value  # that it solves for, of the eight
    lower: Value  # whether its warp has the lower block of a pair
    first: Value  # whether it holds the diagonal in the first of its two columns
    second: Value  # or in the second


def _place() -> _Place:
    thread = thread_index()
    lane, block = bits_and(thread, WARP - 1), bits_and(shifted_right(thread, 1), 3 * BLOCK)
    row, quad = shifted_right(lane, 2), bits_and(lane, 3)
    eight, sixteen = bits_and(lane, EIGHT - 1), shifted_right(lane, 4)
    own = bits_and(shifted_right(lane, 3), 1)  # the block of eight rows in which it solves
    half = shifted_left(own, 2)  # of eight columns that it moves

    def floats(row: Value, column: Value) -> Value:
        return add(times(row, ROW), column)

    matrix = floats(add(add(block, eight), shifted_left(sixteen, 3)), half)
    diagonal = shifted_left(own, 3)
    factors = floats(bits_or(block, diagonal), diagonal)
    place = bits_or(shifted_right(row, 1), shifted_left(bits_and(row, 1), 2))
    column = floats(add(block, shifted_left(quad, 1)), place)
    lower = not_equal(bits_and(block, BLOCK), 0)
    return _Place(
        matrix=matrix,
        square=add(matrix, shifted_left(sixteen, 3)),
        solved=add(factors, times(eight, ROW)),
        factors=factors,
        column=column,
        above=floats(add(bits_and(block, PAIR), shifted_left(quad, 1)), place),
        row=eight,
        lower=lower,
        first=equal(row, shifted_left(quad, 1)),
        second=equal(row, add(shifted_left(quad, 1), 1)),
    )


def _invert(ctx: object, x: Fragments, scratch: Value) -> Fragments:
    """Register `[n, h]` of a thread has row `8 h` and columns `8 n`, `8 n + 1` after its first."""
    del ctx
    place, scratch = _place(), utils.memref_ptr(scratch)
    registers = [[numbers_of(r) for r in pair] for pair in x.registers.reshape(-1, 2)]
    left, right = registers[:2], registers[2:]
    a, b, d = (_chosen(place.lower, right[n][h], left[n][h]) for n, h in ((0, 0), (0, 1), (1, 1)))
    _store(scratch, place.matrix, [*a, *b])
    _store(scratch, place.matrix, d, after=EIGHT * ROW + EIGHT)
    for n in range(2):
        _store(scratch, place.matrix, [*left[n][0], *left[n][1]], after=BLOCK + EIGHT * n)
    utils.warp_barrier()
    _substitute(place, scratch)
    utils.warp_barrier()
    *v, w0, w1 = _load(scratch, place.square)
    zero = [constant(0.0)] * 2
    factor = _column(scratch, place.column, EIGHT, 0)
    (q,) = _plus_products([[*zero, *b]], [*zero, w0, w1], [factor])
    factor = _column(scratch, place.column, 0, 0)
    (q,) = _plus_products([q], [*zero, *q[2:]], [factor])
    y = q[2:]
    # In the place of `B`, which every lane has read: the product waits for the whole warp.
    _store(scratch, place.matrix, y, after=EIGHT * ROW)
    block = [[v, y], [zero, [w0, w1]]]
    q = [[*left[n][0], *left[n][1]] for n in range(2)]
    for k in range(2):
        factors = [_column(scratch, place.column, EIGHT * k, BLOCK + EIGHT * n) for n in range(2)]
        q = _plus_products(q, [*block[k][0], *block[k][1]], factors, where=place.lower)
    utils.warpgroup_barrier()
    factors = [_column(scratch, place.above, EIGHT, EIGHT * n) for n in range(2)]
    below = _plus_products(q, q[1], factors, where=place.lower)
    factor = _column(scratch, place.above, 0, 0)  # right of it `V` is zero
    below[:1] = _plus_products(below[:1], q[0], [factor], where=place.lower)
    ones = [_chosen(at, [constant(1.0)], [constant(0.0)])[0] for at in (place.first, place.second)]
    block = [[sums(v, ones), y], [zero, sums([w0, w1], ones)]]
    below = [[y[:2], y[2:]] for y in below]
    results = [[_chosen(place.lower, below[n][h], block[n][h]) for h in range(2)] for n in range(2)]
    results += [[_chosen(place.lower, block[n][h], zero) for h in range(2)] for n in range(2)]
    moved = x.registers.copy()
    moved.reshape(-1, 2)[:] = [[packed(numbers) for numbers in pair] for pair in results]
    return type(x)(_registers=moved, _layout=x.layout, _is_signed=x.is_signed)


def _substitute(place: _Place, scratch: Value) -> None:
    """Put `V` and `W` of the warp's two blocks of eight rows in the place of `A` and `D`."""
    row = _eight(scratch, place.solved, EIGHT)
    row = [_chosen(greater(place.row, c), [x], [constant(0.0)])[0] for c, x in enumerate(row)]
    for i in range(EIGHT - 1, 0, -1):
        factors = _eight(scratch, place.factors, i, after=i * ROW)
        row[:i] = _plus_multiple(row[:i], row[i], factors)
    utils.warp_barrier()
    for at in range(2):
        write(scratch, place.solved, row[at::2], after=VECTOR * at)


def _plus_products(
    totals: list[list[Value]],
    left: list[Value],
    right: list[list[Value]],
    where: Value | None = None,
) -> list[list[Value]]:
    """`totals + left right` for some of both, 16 x 8 times 8 x 8.

    Args:
        totals: For each product, of a thread's two rows, eight apart, two neighbouring columns.
        left: The same.
        right: For each product, two neighbouring rows of a column.
        where: Whether the warp computes these at all; otherwise the totals stay.
    """
    left_parts = [_split(x) for x in left]
    right_parts = [[_split(x) for x in numbers] for numbers in right]
    for i, j in ((1, 0), (0, 1), (0, 0)):  # the two low parts are left out
        operand = [x[i] for x in left_parts]
        totals = [
            _multiply_add(operand, [x[j] for x in numbers], total, where)
            for numbers, total in zip(right_parts, totals, strict=True)
        ]
    return totals


def _split(x: Value) -> tuple[Value, Value]:
    """Split a value into what the tensor cores read in tf32, and the rest."""
    high = utils.bitcast(bits_and(utils.bitcast(x, integer()), -1 << 13), ir.F32Type.get())
    return high, arith.subf(x, high)


def _multiply_add(
    left: list[Value], right: list[Value], total: list[Value], where: Value | None = None
) -> list[Value]:
    f32 = ir.F32Type.get()
    upper, upper_next, lower, lower_next = left
    words = [utils.bitcast(x, integer()) for x in (upper, lower, upper_next, lower_next, *right)]
    operands, sources = [*words, *total], ["f"] * 4
    before, added = "", "{$10,$11,$12,$13}"
    if where is not None:
        # Where it does not run, the results are what their registers held: the totals.
        operands, sources = [*operands, where], ["0", "1", "2", "3", "b"]
        before, added = "@$14 ", "{$0,$1,$2,$3}"
    instruction = (
        f"{before}mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        f"{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {added};"
    )
    constraints = ["=f"] * 4 + ["r"] * 6 + sources
    result = llvm.StructType.get_literal([f32] * 4)
    out: Value = llvm.inline_asm(
        result, operands, instruction, ",".join(constraints), has_side_effects=False
    )
    return [llvm.extractvalue(f32, out, [at]) for at in range(4)]


def _plus_multiple(x: list[Value], factor: Value, y: list[Value]) -> list[Value]:
    return [math.fma(factor, b, a) for a, b in zip(x, y, strict=True)]


def _chosen(condition: Value, x: list[Value], y: list[Value]) -> list[Value]:
    return [arith.select(condition, a, b) for a, b in zip(x, y, strict=True)]


def _store(pointer: Value, first: Value, numbers: list[Value], after: int = 0) -> None:
    """Store values of two or four matrices of eight rows, of which a lane addresses one."""
    words = ", ".join(f"${i}" for i in range(1, len(numbers) + 1))
    instruction = f"stmatrix.sync.aligned.m8n8.x{len(numbers)}.shared.b16 [$0], {{{words}}};"
    values = [utils.bitcast(x, integer()) for x in numbers]
    address = address_of(pointer, first, after)
    inline_ptx(instruction, address, *values, has_side_effects=True, convergent=True)


def _load(pointer: Value, first: Value) -> list[Value]:
    """Load values of four matrices that another thread may have stored."""
    instruction = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    words = inline_ptx(
        instruction, address_of(pointer, first), result_types=[integer()] * 4,
        has_side_effects=True, convergent=True,
    )  # fmt: skip
    return [utils.bitcast(word, ir.F32Type.get()) for word in words]


def _column(pointer: Value, first: Value, row: int, column: int) -> list[Value]:
    """Read two values below one another; `column` is a multiple of eight."""
    return [read(pointer, first, 1, after=i * ROW + column)[0] for i in (row, row + 1)]


def _eight(pointer: Value, first: Value, count: int, after: int = 0) -> list[Value]:
    """Read the first `count` columns of eight."""
    even = read(pointer, first, (count + 1) // 2, after)
    odd = read(pointer, first, count // 2, after + VECTOR)
    numbers = [*even, *odd]
    numbers[::2], numbers[1::2] = even, odd
    return numbers
