"""From projections to heads: convolution, feature map and norm."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from deltanet_jax.core.numerics import accumulation_dtype
from deltanet_jax.layers.convolution import ShortConvolution, causal_convolution
from deltanet_jax.layers.features import FEATURE_MAPS
from deltanet_jax.layers.norms import NORMS
from deltanet_jax.layers.options import LayerOptions

__all__ = ["activate_heads", "key_features", "value_features"]


def key_features(x: Float[Array, "B T H D"], options: LayerOptions) -> Float[Array, "B T H K"]:
    features = FEATURE_MAPS[options.feature_map](x, options.dpfp_nu)
    return NORMS[options.qk_norm](features)


def value_features(x: Float[Array, "B T HV V"]) -> Float[Array, "B T HV V"]:
    return jax.nn.silu(x)


def activate_heads(
    projected: Float[Array, "B T HD"],
    conv: ShortConvolution | None,
    inputs: Float[Array, "B W-1 HD"] | None,
    heads: int,
    activation: Callable[[jax.Array], jax.Array],
    *,
    runs: Int[Array, "B T"] | None,
) -> Float[Array, "B T H K"]:
    """Convolve and activate in float32, rounded once; only the input is a residual."""

    @jax.checkpoint
    def activate(x: jax.Array, kernel: jax.Array | None) -> jax.Array:
        y = x.astype(accumulation_dtype(x))
        if kernel is not None:
            y = causal_convolution(y, kernel, inputs, runs)
        return activation(y.reshape(*y.shape[:2], heads, y.shape[2] // heads)).astype(x.dtype)

    y: jax.Array = activate(projected, None if conv is None else conv.kernel[...])
    return y
