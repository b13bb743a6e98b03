"""Write strength and log-decay, from the layer's input to the operator's arguments.

All of it is float32 from the projections on: a gate rounded to 16 bits is a different decay.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from deltanet_jax.core.numerics import accumulation_dtype
from deltanet_jax.layers.parameters import HEADS, parameter

__all__ = [
    "DecayParameters",
    "bounded_strength",
    "decay_parameters",
    "log_decay",
    "write_strength",
]

MIN_RATE, MAX_RATE = 1e-3, 16.0
MIN_STEP, MAX_STEP = 1e-3, 0.1
LARGEST_LOG_RATE = 88.0  # whose exponential is in float32


def write_strength(
    logits: Float[Array, "B T HV"] | None, shape: tuple[int, ...], *, allow_neg_eigval: bool
) -> Float[Array, "B T HV"]:
    """`beta = sigmoid(logits)` in (0, 1), or 1 without logits; doubled for negative eigenvalues."""
    if logits is None:
        beta = jnp.ones(shape, jnp.float32)
    else:
        beta = jax.nn.sigmoid(logits.astype(accumulation_dtype(logits)))
    return 2 * beta if allow_neg_eigval else beta


def bounded_strength(
    beta: Float[Array, "B T HV"], k: Float[Array, "B T H K"]
) -> Float[Array, "B T HV"]:
    """`beta` for unit keys that were rounded, so that no step makes the state grow.

    The eigenvalue along `k` is `1 - beta |k|^2`. A unit key rounded to 16 bits can be longer
    than one, and with `beta` near 2 the state would then grow without bound.
    """
    kept = jnp.finfo(k.dtype)  # type: ignore[no-untyped-call]
    k = jax.lax.stop_gradient(k).astype(beta.dtype)
    if kept.bits == 16:
        # The compiler may drop a round trip through 16 bits, but not this rounding.
        k = jax.lax.reduce_precision(k, kept.nexp, kept.nmant)
    norm = jnp.repeat(jnp.sum(k * k, axis=-1), beta.shape[-1] // k.shape[2], axis=-1)
    return beta / jnp.maximum(norm, 1)


class DecayParameters(nnx.Module):
    """The two parameters of a decay; float32 whatever the layer's `param_dtype` is."""

    def __init__(self, shape: tuple[int, ...], *, rngs: nnx.Rngs) -> None:
        rate, bias = decay_parameters(shape, rngs)
        names = (HEADS,) + (None,) * (len(shape) - 1)
        self.A_log = parameter(rate, names[:1])
        self.dt_bias = parameter(bias, names)

    def __call__(self, x: Float[Array, "B T *HV_K"]) -> Float[Array, "B T *HV_K"]:
        return log_decay(x, self.A_log[...], self.dt_bias[...])


def decay_parameters(shape: tuple[int, ...], rngs: nnx.Rngs) -> tuple[jax.Array, jax.Array]:
    """Initial `A_log [HV]` and `dt_bias` of this shape, both float32.

    The rate `A` is uniform in (0, 16) and the step `dt` log-uniform in [1e-3, 0.1]; the bias
    is the inverse softplus of the step, so that the decay starts at `-A * dt`.
    """
    rate = jax.random.uniform(
        rngs.params(), shape[:1], jnp.float32, minval=MIN_RATE, maxval=MAX_RATE
    )
    log_step = jax.random.uniform(
        rngs.params(), shape, jnp.float32, minval=jnp.log(MIN_STEP), maxval=jnp.log(MAX_STEP)
    )
    step = jnp.exp(log_step)
    return jnp.log(rate), step + jnp.log(-jnp.expm1(-step))


def log_decay(
    x: Float[Array, "B T *HV_K"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, "*HV_K"],
) -> Float[Array, "B T *HV_K"]:
    """`g = -exp(A_log) * softplus(x + dt_bias)`, never positive."""
    # The largest rate is finite: times a softplus of 0 an infinite one would be NaN.
    rate = jnp.exp(jnp.minimum(A_log.astype(jnp.float32), LARGEST_LOG_RATE))
    if dt_bias.ndim == 2:
        rate = rate[:, None]
    bias = dt_bias.astype(jnp.float32)
    rate, bias = (jnp.expand_dims(y, tuple(range(x.ndim - y.ndim))) for y in (rate, bias))
    x = x.astype(accumulation_dtype(x))
    return -rate * jax.nn.softplus(x + bias)
