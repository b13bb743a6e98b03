"""Names that move between JAX releases, in one place."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

__all__ = ["enable_x64", "repeat", "type_like", "vary_like", "varying_axes"]


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


def enable_x64(enabled: bool = True) -> object:
    """Context manager that turns 64-bit types on or off."""
    return jax.enable_x64(enabled)
