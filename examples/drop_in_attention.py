"""The delta rule where a model calls `jax.nn.dot_product_attention`.

Shapes, grouped heads, `scale`, `is_causal`, the two lengths and `implementation` are as there.
What softmax attention has and a recurrence has not is refused: a bias, a mask over pairs, a
window, attention to the future or to another sequence.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax import delta_rule

__all__ = ["delta_rule_attention", "fastest_attention"]


def delta_rule_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T G H"],
    value: Float[Array, "B T G H"],
    bias: None = None,
    mask: None = None,
    *,
    beta: Float[Array, "B T N"] | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention by the delta rule over unit queries and keys.

    Args:
        query: Queries; `N` is a multiple of `G`.
        key: Keys; one head serves `N // G` heads of queries.
        value: Values.
        bias: Must be `None`.
        mask: Must be `None`.
        beta: Write strengths in [0, 2]; 1 by default: a key's newest value replaces the older.
        scale: Factor on the queries; `H**-0.5` by default.
        is_causal: Must be true.
        query_seq_lengths: Real tokens of each row; the output behind them is zero.
        key_value_seq_lengths: Tokens of each row that are written.
        implementation: See `deltanet_jax.linear_attention`.

    Raises:
        ValueError: If a recurrence cannot do what is asked.
    """
    if bias is not None or mask is not None or not is_causal:
        raise ValueError("a recurrence is causal and has no `bias` and no `mask` over pairs")
    if query.shape[1] != key.shape[1] or query.shape[2] % key.shape[2]:
        raise ValueError(f"`key` must fit `query`; got {key.shape=}, {query.shape=}")
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    if beta is None:
        beta = jnp.ones(query.shape[:3], jnp.float32)
    if key_value_seq_lengths is not None:
        beta = jnp.where(_before(key_value_seq_lengths, beta), beta, 0)
    o, _ = delta_rule(
        _unit(query), _unit(key), value, beta, scale=scale, implementation=implementation
    )
    return o if query_seq_lengths is None else jnp.where(_before(query_seq_lengths, o), o, 0)


def _before(lengths: jax.Array, like: jax.Array) -> jax.Array:
    real = jnp.arange(like.shape[1]) < lengths[:, None]
    return real.reshape(real.shape + (1,) * (like.ndim - 2))


def _unit(x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


# What a model takes as its attention function: kernels where they run, plain XLA elsewhere.
fastest_attention = partial(delta_rule_attention, implementation=("pallas", "chunkwise"))
