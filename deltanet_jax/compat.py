"""Names that move between JAX releases, in one place."""

import jax
import jax.numpy as jnp

__all__ = ["enable_x64", "vary_like"]


def vary_like(x: jax.Array, *others: jax.Array | None) -> jax.Array:
    """`x`, typed as varying over every `shard_map` axis that one of `others` varies over.

    The carry of a scan must enter with the type it leaves with; a constant made inside
    `shard_map` varies over no axis until it is said to.
    """
    wanted = frozenset[str]().union(*(_varying(y) for y in others if y is not None))
    missing = tuple(sorted(wanted - _varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(jnp.asarray(x)).mat.varying)


def enable_x64(enabled: bool = True) -> object:
    """Context manager that turns 64-bit types on or off."""
    return jax.enable_x64(enabled)
