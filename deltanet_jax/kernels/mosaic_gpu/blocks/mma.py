"""Products of tiles by the tensor cores, for a warpgroup."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Ref

__all__ = ["Split", "accumulate", "of_halves", "product", "products"]

# An operand is a tile or, on the left, 16-bit registers.
Pair = tuple[jax.Array | Ref, Ref]
Pairs = Sequence[Pair]
Split = Sequence[jax.Array | Ref]  # a split (high, low) pair
_ACC: Any = plgpu.ACC


def _start(acc: Ref, pairs: Pairs) -> None:
    for lhs, rhs in pairs:
        plgpu.wgmma(acc, lhs, rhs)


def _emulated(shape: tuple[int, ...], pairs: Pairs) -> jax.Array:
    """The interpreter has no products whose left operand is in registers."""
    total = jnp.zeros(shape, jnp.float32)
    for lhs, rhs in pairs:
        total += jnp.dot(lhs[...], rhs[...], preferred_element_type=jnp.float32)
    return total


def product(
    shape: tuple[int, ...],
    *pairs: Pair,
    init: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`init` plus the sum of `lhs @ rhs` over pairs of tiles, in float32 registers."""
    if init is not None:
        return accumulate((init, pairs), interpret=interpret)[0]
    return products((shape, pairs), interpret=interpret)[0]


def products(
    *operands: tuple[tuple[int, ...], Pairs],
    meanwhile: Callable[[], None] | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """One product for each `(shape, pairs)`, none waiting for another.

    `meanwhile` is called once all are started, so that its work is overlapped with them.
    """

    def body(*accs: Ref) -> list[jax.Array]:
        for acc, (_, pairs) in zip(accs, operands, strict=True):
            _start(acc, pairs)
        if meanwhile is not None:
            meanwhile()
        return [acc[...] for acc in accs]

    if interpret:
        if meanwhile is not None:
            meanwhile()
        return [_emulated(*x) for x in operands]
    accs = [_ACC(shape, jnp.float32) for shape, _ in operands]
    # Without the barrier the compiler moves arithmetic on the result before the wait.
    return list(jax.lax.optimization_barrier(pl.run_scoped(body, *accs)))


def of_halves(x: Split, y: Split) -> tuple[Pair, Pair, Pair]:
    """List the products that make `x y` of two split pairs; low times low is left out."""
    return (x[0], y[0]), (x[0], y[1]), (x[1], y[0])


def accumulate(*operands: tuple[jax.Array, Pairs], interpret: bool) -> list[jax.Array]:
    """`init` plus the sum of products for each `(init, pairs)`, none waiting for another."""

    def body(accs: tuple[Ref, ...]) -> None:
        for acc, (_, pairs) in zip(accs, operands, strict=True):
            _start(acc, pairs)

    if interpret:
        return [init + _emulated(init.shape, pairs) for init, pairs in operands]
    # Accumulating in place keeps one accumulator live, not two.
    accs = tuple(_ACC.init(init) for init, _ in operands)
    return list(jax.lax.optimization_barrier(pl.run_state(body)(accs)))
