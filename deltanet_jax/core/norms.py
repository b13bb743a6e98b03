"""Norms of rows that neither overflow nor divide by zero."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.core.numerics import accumulation_dtype

__all__ = ["l2_norm", "safe_factor"]

L2_EPS = 1e-6
# Rows with larger elements are scaled down, so that sums of their squares stay in float32.
LARGE, FACTOR = 2.0**48, 2.0**-80


def safe_factor(x: Float[Array, "*B K"]) -> Float[Array, "*B 1"]:
    """Return what each row is multiplied by before it is squared: 1 unless it is large.

    A power of two, so that nothing is rounded; it has no gradient.
    """
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=-1, keepdims=True, initial=0.0)
    return jnp.where(largest > LARGE, FACTOR, 1.0).astype(x.dtype)


def l2_norm(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """Scale rows to unit length; a zero row stays zero, with a finite gradient.

    Computed and returned in float32 (float64 for float64 inputs).

    Example:
        >>> l2_norm(jnp.asarray([[3.0, 4.0], [0.0, 0.0]])).round(3)
        Array([[0.6, 0.8],
               [0. , 0. ]], dtype=float32)
    """
    x = x.astype(accumulation_dtype(x))
    factor = safe_factor(x)
    x = x * factor
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(squares + L2_EPS * factor * factor)
