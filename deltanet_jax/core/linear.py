"""Linear maps with a hand-written transpose, under every transform of JAX.

`jax.custom_vjp` takes forward mode away from a function, and `jax.custom_derivatives.linear_call`
cannot be vmapped. Here the map itself is run in forward mode, its transpose in reverse mode, each
is the transpose of the other, and both are differentiated and vmapped as they stand.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from deltanet_jax import compat

__all__ = ["linear_map"]

Map = Callable[[Any, Any], Any]
Arrays = Sequence[Any]


def linear_map(function: Map, transpose: Map, given: Any, x: Any) -> Any:
    """`function(given, x)`, with the derivative in reverse mode by `transpose(given, ct)`.

    Args:
        function: Linear in `x`. It may use no array but its arguments.
        transpose: From cotangents of the result to those of `x`, in the structure of `x`. The same
            holds for it.
        given: A pytree of arrays that both read.
        x: A pytree of arrays.
    """
    known: list[jax.Array]
    leaves: list[jax.Array]
    known, known_tree = jax.tree.flatten(given)
    leaves, x_tree = jax.tree.flatten(x)
    # The transpose must return what each of them is: all vary over the same axes of a mesh.
    leaves = [compat.vary_like(leaf, *known, *leaves) for leaf in leaves]
    out_tree = jax.tree.structure(jax.eval_shape(function, given, x))

    def flat(of_trees: Map, tree: Any) -> Callable[..., list[jax.Array]]:
        def run(*args: jax.Array) -> list[jax.Array]:
            given = jax.tree.unflatten(known_tree, args[: len(known)])
            return jax.tree.leaves(of_trees(given, jax.tree.unflatten(tree, args[len(known) :])))

        return run

    out = _linear_p.bind(
        *known, *leaves,
        function=flat(function, x_tree), transpose=flat(transpose, out_tree), known=len(known),
    )  # fmt: skip
    return jax.tree.unflatten(out_tree, out)


_linear_p = Primitive("linear_map")
_linear_p.multiple_results = True


@_linear_p.def_impl
def _run(*args: jax.Array, function: Callable[..., Any], **_: Any) -> Any:
    return function(*args)


@_linear_p.def_abstract_eval
def _abstract(*args: Any, function: Callable[..., Any], **_: Any) -> Any:
    return jax.make_jaxpr(function)(*args).out_avals


def _jvp(primals: Arrays, tangents: Arrays, *, known: int, **maps: Any) -> tuple[Any, Any]:
    """The map of the tangents of `x`, and the derivative with respect to `given` as it comes."""
    out = _linear_p.bind(*primals, **maps, known=known)
    moved = [ad.instantiate_zeros(t) for t in tangents]
    change = _linear_p.bind(*primals[:known], *moved[known:], **maps, known=known)
    if any(not isinstance(t, ad.Zero) for t in tangents[:known]):
        run = lambda *given: maps["function"](*given, *primals[known:])  # noqa: E731
        _, other = jax.jvp(run, tuple(primals[:known]), tuple(moved[:known]))
        change = [a + b for a, b in zip(change, other, strict=True)]
    return out, change


def _transpose(
    cotangents: Arrays, *args: Any, function: Any, transpose: Any, known: int
) -> list[Any]:
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    found = _linear_p.bind(
        *args[:known], *cotangents, function=transpose, transpose=function, known=known
    )
    linear = zip(args[known:], found, strict=True)
    return [None] * known + [ct if ad.is_undefined_primal(x) else None for x, ct in linear]


def _batch(
    args: Arrays, dims: Arrays, *, function: Any, transpose: Any, known: int
) -> tuple[Any, Any]:
    """Batch the map. Every part of `x` gets the axis, because its gradient has it."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    x = [
        batching.bdim_at_front(leaf, d, size)
        for leaf, d in zip(args[known:], dims[known:], strict=True)
    ]

    def over_batch(run: Callable[..., Any]) -> Callable[..., Any]:
        def batched(*args: jax.Array) -> Any:
            axes = (*dims[:known], *[0] * (len(args) - known))
            return jax.vmap(run, in_axes=axes)(*args)

        return batched

    out = _linear_p.bind(
        *args[:known], *x,
        function=over_batch(function), transpose=over_batch(transpose), known=known,
    )  # fmt: skip
    return out, [0] * len(out)


ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(_run, multiple_results=True))
