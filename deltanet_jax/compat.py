"""Names that move between JAX releases, in one place."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

__all__ = [
    "enable_x64",
    "on_whole_axes",
    "repeat",
    "rows",
    "shard_like",
    "split_over",
    "type_like",
    "vary_like",
    "varying_axes",
    "with_default_promotion",
    "zeros_like",
]

P = ParamSpec("P")
R = TypeVar("R")


def vary_like(x: jax.Array, *others: jax.Array | None) -> jax.Array:
    """`x`, typed as varying over every `shard_map` axis that one of `others` varies over.

    The carry of a scan must enter with the type it leaves with; a constant made inside
    `shard_map` varies over no axis until it is said to.
    """
    wanted = frozenset[str]().union(*(varying_axes(y) for y in others if y is not None))
    missing = tuple(sorted(wanted - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The `shard_map` axes over which `x` is typed as varying."""
    return frozenset(jax.typeof(jnp.asarray(x)).mat.varying)


def type_like(x: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of an array that varies over the same `shard_map` axes as `x`."""
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        shape, dtype, manual_axis_type=jax.typeof(x).mat
    )


def repeat(x: jax.Array, repeats: int, axis: int) -> jax.Array:
    """`jnp.repeat` that keeps the sharding of `x`, which a mesh with explicit axes asks for."""
    sharding = jax.typeof(x).sharding
    explicit = any(part is not None for part in sharding.spec)
    return jnp.repeat(x, repeats, axis=axis, out_sharding=sharding if explicit else None)


def shard_like(x: jax.Array, like: jax.Array, axes: tuple[int | None, ...]) -> jax.Array:
    """`x` with axis `i` sharded as axis `axes[i]` of `like` is, on a mesh with explicit axes."""
    spec = _explicit_spec(like)
    if spec is None:
        return x
    return _reshard(x, [None if axis is None else spec[axis] for axis in axes])


def zeros_like(x: jax.Array) -> jax.Array:
    """Return zeros of the shape and sharding of `x`, on the axes of `vmap` as well.

    A plain constant has no axis of `vmap`; where that axis is sharded explicitly, what joins the
    two arrays fails. The compiler makes a constant of this one.
    """
    return jnp.where(False, x, jnp.zeros((), x.dtype))


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]`, sharded as the ids are on a mesh with explicit axes."""
    spec = _explicit_spec(ids)
    out = None if spec is None else _partition(*spec, None)
    return table.at[ids].get(out_sharding=out)


def on_whole_axes(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`function(x)` of an `x` that is gathered for it, and sharded as before afterwards.

    Only for small arrays: on a mesh with explicit axes, what cuts a sharded axis must gather it.
    """
    spec = _explicit_spec(x)
    if spec is None:
        return function(x)
    whole = _reshard(x, (None,) * x.ndim)
    return _reshard(function(whole), spec)


def split_over(x: jax.Array, axis: int) -> str | None:
    """Name the explicit mesh axes that split this axis of `x` over several devices."""
    spec = _explicit_spec(x)
    part = None if spec is None else spec[axis]
    names = part if isinstance(part, tuple) else () if part is None else (part,)
    several = [str(n) for n in names if jax.typeof(x).sharding.mesh.shape[n] > 1]
    return ", ".join(several) or None


def _explicit_spec(x: jax.Array) -> tuple[object, ...] | None:
    """How each axis of `x` is sharded over explicit axes of a mesh; `None` where none is."""
    spec = tuple(jax.typeof(x).sharding.spec)
    spec += (None,) * (x.ndim - len(spec))
    return spec if any(part is not None for part in spec) else None


def _reshard(x: jax.Array, spec: Sequence[object]) -> jax.Array:
    if tuple(spec) == (_explicit_spec(x) or (None,) * x.ndim):
        return x
    resharded: jax.Array = jax.sharding.reshard(x, _partition(*spec))  # type: ignore[no-untyped-call]
    return resharded


def _partition(*parts: object) -> PartitionSpec:
    make: Callable[..., PartitionSpec] = PartitionSpec
    return make(*parts)


def with_default_promotion(function: Callable[P, R]) -> Callable[P, R]:
    """Trace `function` with JAX's default promotion of dtypes and ranks, whatever is set outside.

    For the bodies of kernels, whose scalars and tiles mix both.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return run


def enable_x64(enabled: bool = True) -> AbstractContextManager[None]:
    """Context manager that turns 64-bit types on or off."""
    manager: AbstractContextManager[None] = jax.enable_x64(enabled)
    return manager
