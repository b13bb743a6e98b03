"""Causal depthwise short convolution that can be continued and packed."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from deltanet_jax.core.numerics import accumulation_dtype
from deltanet_jax.layers.parameters import HEADS, parameter

__all__ = ["ShortConvolution", "causal_convolution", "next_inputs"]


def causal_convolution(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "W D"],
    inputs: Float[Array, "B W-1 D"] | None = None,
    runs: Int[Array, "B T"] | Int[Array, "B W-1+T"] | None = None,
) -> Float[Array, "B T D"]:
    """A convolution over time, each channel by itself, accumulated in float32.

    ::

        y_t = sum_j kernel_j * x_{t - (W-1) + j}

    Args:
        x: Inputs.
        kernel: Its last row weighs the present token.
        inputs: The `W - 1` inputs before these; zeros by default.
        runs: Number of the packed sequence that each token belongs to; a tap that would read
            from another one reads zero; `inputs` belong to the first, unless the numbers
            of theirs stand before the others.
    """
    W, T = kernel.shape[0], x.shape[1]
    acc = accumulation_dtype(x, kernel)
    past = _past(x, W, inputs)
    if runs is not None:
        runs_past = runs
        if runs.shape[1] == T:
            runs_past = jnp.pad(runs, [(0, 0), (W - 1, 0)], mode="edge" if T else "constant")
        runs = runs_past[:, W - 1 :]
    y = jnp.zeros(x.shape, acc)
    for j in range(W):
        tap = past[:, j : j + T].astype(acc)
        if runs is not None and j < W - 1:
            same = runs_past[:, j : j + T] == runs
            tap = jnp.where(same[..., None], tap, 0)
        y = y + tap * kernel[j].astype(acc)[None, None]
    return y


def next_inputs(
    x: Float[Array, "B T D"],
    width: int,
    inputs: Float[Array, "B W-1 D"],
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B W-1 D"]:
    """The last `W - 1` inputs once these have been read; of row `i` only `lengths[i]` count."""
    past = _past(x, width, inputs)
    if lengths is None:
        return past[:, x.shape[1] :]
    rows = lengths[:, None] + jnp.arange(width - 1)[None]
    return jnp.take_along_axis(past, rows[..., None], axis=1)


def _past(x: jax.Array, width: int, inputs: jax.Array | None) -> jax.Array:
    """The inputs before these, then these: `[B, W - 1 + T, D]`."""
    if inputs is None:
        return jnp.pad(x, [(0, 0), (width - 1, 0), (0, 0)])
    return jnp.concatenate([inputs.astype(x.dtype), x], axis=1)


class ShortConvolution(nnx.Module):
    """The kernel `[W, D]` of a `causal_convolution`, uniform in `+-1/sqrt(W)` at first."""

    def __init__(
        self, features: int, width: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        bound = width**-0.5
        values = jax.random.uniform(
            rngs.params(), (width, features), param_dtype, minval=-bound, maxval=bound
        )
        self.width = width
        self.kernel = parameter(values, (None, HEADS))
