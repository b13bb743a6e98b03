"""Normalisations, computed in float32 for 16- and 32-bit inputs."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from deltanet_jax.core.norms import l2_norm, safe_factor, unit_rows
from deltanet_jax.core.numerics import accumulation_dtype
from deltanet_jax.layers.parameters import parameter

__all__ = ["NORMS", "RMSNorm", "l2_norm", "no_norm", "sum_norm"]

SUM_EPS = 1e-4  # 1/SUM_EPS is the gradient of a zero row, and float16 ends at 65504


def sum_norm(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """`x / sum(|x|)`: for a positive feature map the sum normalisation of Schlag et al., 2021."""
    x = x.astype(accumulation_dtype(x))
    factor = safe_factor(x)
    x = x * factor
    return x / jnp.maximum(jnp.sum(jnp.abs(x), axis=-1, keepdims=True), SUM_EPS * factor)


def no_norm(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    return x.astype(accumulation_dtype(x))


NORMS = {"l2": l2_norm, "sum": sum_norm, "none": no_norm}


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis with a learned scale.

    ::

        y = x / sqrt(mean(x^2) + eps) * scale

    Statistics and product are float32; the result has the dtype of the input, or `dtype`. For
    the backward pass only the input is kept.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        axis_name: str | None = None,
    ) -> None:
        self.eps = eps
        self.dtype = dtype
        self.scale = parameter(jnp.ones((features,), param_dtype), (axis_name,))

    def __call__(self, x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
        K = x.shape[-1]
        scale = self.scale[...].astype(accumulation_dtype(x)) * K**0.5
        y = unit_rows(x, scale, K * self.eps)
        return y.astype(self.dtype or x.dtype)
