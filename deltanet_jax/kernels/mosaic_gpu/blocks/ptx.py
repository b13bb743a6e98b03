"""Operations of one thread: on its integers and floats, and on the memory that it points to.

The vocabulary of code written against the layer below Pallas.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

__all__ = [
    "Fragments",
    "Value",
    "add",
    "address_of",
    "bits_and",
    "bits_or",
    "constant",
    "divided",
    "equal",
    "greater",
    "inline_ptx",
    "integer",
    "less",
    "not_equal",
    "numbers_of",
    "packed",
    "read",
    "remainder",
    "shifted_left",
    "shifted_right",
    "smaller",
    "sums",
    "times",
    "write",
]


Value = Any  # of MLIR, whose Python bindings have no public types
Fragments = Any  # an array in registers, a `FragmentedArray` of Mosaic GPU


def inline_ptx(
    instruction: str,
    *operands: Value,
    has_side_effects: bool,
    result_types: Sequence[Value] = (),
    **options: Any,
) -> Value:
    """An instruction of PTX, `$0` and so on being its results and then its operands."""
    emit: Any = utils.inline_ptx  # not in the oldest JAX
    if result_types:
        options["result_types"] = list(result_types)
    return emit(instruction, *operands, has_side_effects=has_side_effects, **options)


def read(pointer: Value, first: Value, count: int, after: int = 0) -> list[Value]:
    """Read up to four floats from `first + after` on; for three, a fourth is loaded and dropped.

    The offset is a multiple of their number, or of four.
    """
    if count == 0:
        return []
    kind = ir.VectorType.get((1 << (count - 1).bit_length(),), ir.F32Type.get())
    loaded = llvm.load(kind, _element(pointer, first, after))
    return [vector.extract(loaded, dynamic_position=[], static_position=[i]) for i in range(count)]


def write(pointer: Value, first: Value, numbers: list[Value], after: int = 0) -> None:
    """Write one, two or four floats from `first + after` on."""
    llvm.store(packed(numbers), _element(pointer, first, after))


def _element(pointer: Value, first: Value, after: int) -> Value:
    f32 = ir.F32Type.get()
    return utils.getelementptr(utils.getelementptr(pointer, [first], f32), [after], f32)


def address_of(pointer: Value, first: Value, after: int = 0) -> Value:
    """Return the shared-memory address of the float at `first + after`."""
    return llvm.ptrtoint(integer(), _element(pointer, first, after))


def numbers_of(register: Value) -> list[Value]:
    """Return the two values of a register."""
    return [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(2)]


def sums(x: list[Value], y: list[Value]) -> list[Value]:
    """Add two lists of floats, one by one."""
    return [arith.addf(a, b) for a, b in zip(x, y, strict=True)]


def packed(values: list[Value]) -> Value:
    """Pack values of one type into a vector."""
    kind = ir.VectorType.get((len(values),), values[0].type)
    return vector.from_elements(kind, values)


def integer() -> Value:
    """The type of 32 bits."""
    return ir.IntegerType.get_signless(32)


def constant(value: float) -> Value:
    """An integer, or a float where the value is one."""
    return utils.c(value, ir.F32Type.get() if isinstance(value, float) else integer())


def _integers(operation: str, x: Value, y: Value | int) -> Value:
    return getattr(arith, operation)(x, constant(y) if isinstance(y, int) else y)


add = functools.partial(_integers, "addi")
times = functools.partial(_integers, "muli")
divided = functools.partial(_integers, "divui")
remainder = functools.partial(_integers, "remui")
smaller = functools.partial(_integers, "minui")
bits_and = functools.partial(_integers, "andi")
bits_or = functools.partial(_integers, "ori")
shifted_left = functools.partial(_integers, "shli")
shifted_right = functools.partial(_integers, "shrui")


def _compared(kind: str, x: Value, y: Value | int) -> Value:
    predicate = getattr(arith.CmpIPredicate, kind)
    return arith.cmpi(predicate, x, constant(y) if isinstance(y, int) else y)


equal = functools.partial(_compared, "eq")
not_equal = functools.partial(_compared, "ne")
greater = functools.partial(_compared, "sgt")
less = functools.partial(_compared, "slt")
