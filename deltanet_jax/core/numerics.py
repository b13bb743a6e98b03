"""The types that results accumulate in, and matrix products in them."""

import jax
import jax.numpy as jnp

__all__ = ["accumulation_dtype", "dot"]


def accumulation_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Return float64 if any array is float64, else float32."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


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
