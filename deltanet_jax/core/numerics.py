"""The types that results accumulate in, and matrix products in them."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

__all__ = ["accumulation_dtype", "common_dtype", "dot", "identity"]


def common_dtype(*types: jax.Array | DTypeLike) -> jnp.dtype:
    """Return the type that arrays or types promote to, also where JAX is told to refuse it."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*types)


def accumulation_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Return float64 if any array is float64, else float32."""
    return common_dtype(*arrays, jnp.float32)


def identity(like: Float[Array, "*B K D"]) -> Float[Array, "... K K"]:
    """Return the identity of the rows of `like`, in its dtype and of its rank."""
    K = like.shape[-2]
    return jnp.eye(K, dtype=like.dtype).reshape((1,) * (like.ndim - 2) + (K, K))


def dot(
    equation: str, x: jax.Array, y: jax.Array, precision: jax.lax.Precision | None
) -> jax.Array:
    """Compute an `einsum` that accumulates in float32 or wider.

    Two 16-bit operands are multiplied as they are. A 16-bit operand beside a wider one is
    widened: on hardware with reduced-precision matrix units, `precision` decides what
    happens then, and nothing can overflow the narrower type.
    """
    acc = accumulation_dtype(x, y)
    if x.dtype != y.dtype:
        x, y = x.astype(acc), y.astype(acc)
    if x.dtype != acc:
        precision = None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=acc)
