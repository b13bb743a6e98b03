"""One token of the recurrence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.core.problem import Tokens

__all__ = ["step"]


def step(
    state: Float[Array, "*B K V"], token: Tokens
) -> tuple[Float[Array, "*B V"], Float[Array, "*B K V"]]:
    """Advance a state by one token: decay, then read the error, then write.

    ::

        S = Diag(exp(g)) S
        S = S + k^T (beta (v - k S))        without the delta rule: S + k^T v
        o = q S

    Args:
        state: The state before the token.
        token: `q` and `k` `[..., K]`, `v` `[..., V]`, `g` `[..., 1]` or `[..., K]`, `beta`
            `[..., 1]`.

    Returns:
        The output without its scale, and the state after the token.
    """
    q, k, v = (x.astype(state.dtype) for x in (token.q, token.k, token.v))
    if token.g is not None:
        state = state * jnp.exp(token.g)[..., None]
    if token.beta is not None:
        v = token.beta * (v - _read(k, state))
    state = state + k[..., :, None] * v[..., None, :]
    return _read(q, state), state


def _read(x: Float[Array, "*B K"], state: Float[Array, "*B K V"]) -> Float[Array, "*B V"]:
    """Compute `x S` in full precision: a rounded read would be written back into the state."""
    return jnp.einsum("...k,...kv->...v", x, state, precision=jax.lax.Precision.HIGHEST)
