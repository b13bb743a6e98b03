"""Feature maps of queries and keys."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["FEATURE_MAPS", "dpfp", "elu_plus_one", "feature_dim", "identity"]

FeatureMap = Callable[[Float[Array, "*B D"], int], Float[Array, "*B K"]]


def identity(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    return x


def elu_plus_one(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """ELU + 1, positive everywhere: Katharopoulos et al., 2020."""
    return jax.nn.elu(x) + 1


def dpfp(x: Float[Array, "*B D"], nu: int) -> Float[Array, "*B K"]:
    """Deterministic parameter-free projection to `K = 2 * nu * D` features, all >= 0.

    ::

        r = relu([x, -x])
        phi(x) = [r_i * r_{i-1}, r_i * r_{i-2}, ..., r_i * r_{i-nu}]

    Indices wrap around, so that most pairs of inputs share no active feature.

    References:
        Schlag et al., 2021, arXiv:2102.11174, section 5.3.
    """
    rectified = jax.nn.relu(jnp.concatenate([x, -x], axis=-1))
    shifted = [rectified * jnp.roll(rectified, shift, axis=-1) for shift in range(1, nu + 1)]
    return jnp.concatenate(shifted, axis=-1)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "silu": lambda x, nu: jax.nn.silu(x),
    "relu": lambda x, nu: jax.nn.relu(x),
    "elu": lambda x, nu: elu_plus_one(x),
    "identity": lambda x, nu: identity(x),
    "dpfp": dpfp,
}


def feature_dim(feature_map: str, head_dim: int, nu: int) -> int:
    """The key dim `K` that a feature map makes of `head_dim`."""
    return 2 * nu * head_dim if feature_map == "dpfp" else head_dim
