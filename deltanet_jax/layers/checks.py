"""Checks of what a layer is called with; every message names the argument."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from deltanet_jax.core import checks
from deltanet_jax.layers.cache import DeltaNetCache

__all__ = [
    "check_batch_size",
    "check_cache",
    "check_dtype",
    "check_input",
    "check_per_token",
    "check_rngs",
    "check_vocabulary",
]


def check_dtype(name: str, dtype: DTypeLike) -> jnp.dtype:
    """A floating-point dtype."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # NumPy reads None as float64
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(f"`{name}` must be a floating-point dtype; got {dtype!r}")
    return found


def check_batch_size(batch_size: object) -> int:
    return checks.whole("batch_size", batch_size, least=1)


def check_input(x: object, hidden_size: int) -> jax.Array:
    """`x` as a floating-point array `[B, T, hidden_size]`."""
    axes = f"[B, T, hidden_size={hidden_size}]"
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"`x` must be an array {axes}; got {type(x).__name__}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"`x` must have a floating-point dtype; got {x.dtype}")
    if x.ndim != 3 or x.shape[2] != hidden_size:
        raise ValueError(f"`x` must have shape {axes}; got {x.shape}")
    return jnp.asarray(x)


def check_per_token(name: str, x: object, shape: tuple[int, ...], kind: type) -> jax.Array | None:
    """An array `[B, T]` of this kind of dtype, or `None`."""
    if x is None:
        return None
    wanted = "a boolean" if kind is np.bool_ else "an integer"
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(
            f"`{name}` must be an array [B, T] of {wanted} dtype; got {type(x).__name__}"
        )
    if not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"`{name}` must have {wanted} dtype; got {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"`{name}` must have shape [B, T] = {list(shape)}; got {x.shape}")
    return jnp.asarray(x)


def check_vocabulary(
    name: str, tokens: jax.Array | np.ndarray, mask: jax.Array | None, vocab_size: int
) -> None:
    """Refuse tokens outside the vocabulary where the values are known; masked ones may be."""
    values = checks.known(tokens)
    real = True if mask is None else checks.known(mask)
    if values is None or real is None:
        return
    outside = real & ((values < 0) | (values >= vocab_size))
    if outside.any():
        first = values[outside][0]
        raise ValueError(f"`{name}` must hold tokens in [0, {vocab_size}); got {first}")


def check_rngs(rngs: object) -> None:
    if not isinstance(rngs, nnx.Rngs):
        raise ValueError(
            f"`rngs` must be a flax.nnx.Rngs, such as nnx.Rngs(0); got {type(rngs).__name__}"
        )


def check_cache(cache: object, wanted: DeltaNetCache) -> None:
    """A cache with the shapes of `wanted`, and a state that is not of fewer bits."""
    if not isinstance(cache, DeltaNetCache):
        raise ValueError(
            f"`cache` must be what `init_cache` or `extend` returned; got {type(cache).__name__}"
        )
    for name, got, want in zip(DeltaNetCache._fields, cache, wanted, strict=True):
        shapes = [None if part is None else tuple(part.shape) for part in (got, want)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"`cache.{name}` does not fit this layer and batch; "
                f"got {shapes[0]}, wanted {shapes[1]}"
            )
    if cache.state.dtype != wanted.state.dtype:
        raise ValueError(
            f"`cache.state` must be {wanted.state.dtype}: rounding would add up from token to "
            f"token; got {cache.state.dtype}"
        )
