"""A launch as part of a JAX program: under `vmap`, and inside `shard_map`."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

from deltanet_jax import compat

__all__ = ["batched", "named", "overwriting"]


def named(name: str, body: Callable[..., None]) -> Callable[..., None]:
    """`body` under the name that profiles show for its kernel."""

    def kernel(*refs: object) -> None:
        body(*refs)

    kernel.__name__ = name
    return kernel


def batched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, for which `vmap` is a larger batch: the first axis of every array."""

    @jax.custom_batching.custom_vmap
    def call(*arrays: Any) -> Any:
        given = jax.tree.leaves(arrays)
        # Index arithmetic inside the kernels is in 32 bits.
        with compat.enable_x64(False):
            out = kernel(*jax.tree.map(_local.bind, arrays))
        return jax.tree.map(lambda x: compat.vary_like(x, *given), out)

    @call.def_vmap
    def rule(size: int, is_batched: Any, *arrays: Any) -> Any:
        def merge(x: jax.Array, is_batched: bool) -> jax.Array:
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = call(*jax.tree.map(merge, arrays, tuple(is_batched)))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call


def overwriting(
    kernel: Callable[..., Any],
    inputs: Iterable[jax.Array],
    held: Iterable[jax.Array],
    outputs: Iterable[jax.ShapeDtypeStruct],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Run a `pl.kernel` on `inputs` and then `held`, which it may write over where they lie.

    Returns:
        `held` afterwards, and the kernel's outputs, whose types are `outputs`.
    """

    def run(refs: Any) -> None:
        held, results = refs
        for ref, x in zip(results, kernel(*inputs, *held), strict=True):
            ref[...] = x

    # What is overwritten entirely is never filled with these zeros.
    zeros = [jnp.zeros(x.shape, x.dtype) for x in outputs]
    return pl.run_state(run)((list(held), zeros))


# An array without the type that `shard_map` gives it. Pallas (jax 0.11.2) keeps that type on what
# a kernel loads but not on what it computes, so that the carries of its loops would not match.
_local = Primitive("local")
_local.def_impl(lambda x: x)
_local.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_local, lambda _, x: [x])
