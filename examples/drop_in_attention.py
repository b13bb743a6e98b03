"""The delta rule where a model calls `jax.nn.dot_product_attention`.

Shapes, grouped heads, `scale`, `is_causal`, the two lengths and `implementation` are as there.
What a recurrence cannot do is refused: a bias, a mask over pairs, a window, and attention to the
future or to another sequence.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax import delta_rule, l2_norm

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
    """Compute causal attention by the delta rule over unit queries and keys.

    Args:
        query: Queries; `N` is a multiple of `G`.
        key: Keys; one head serves `N // G` heads of queries.
        value: Values.
        bias: Must be `None`.
        mask: Must be `None`.
        beta: Write strengths in [0, 2]; 1 by default: a new value replaces the old one of its key.
        scale: Factor on the queries; `H**-0.5` by default.
        is_causal: Must be true.
        query_seq_lengths: Number of real tokens in each row; later outputs are zero.
        key_value_seq_lengths: Number of tokens in each row that are written.
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
        l2_norm(query).astype(query.dtype),
        l2_norm(key).astype(key.dtype),
        value,
        beta,
        scale=scale,
        implementation=implementation,
    )
    return o if query_seq_lengths is None else jnp.where(_before(query_seq_lengths, o), o, 0)


def _before(lengths: jax.Array, like: jax.Array) -> jax.Array:
    real = jnp.arange(like.shape[1]) < lengths[:, None]
    return real.reshape(real.shape + (1,) * (like.ndim - 2))


# The attention function of a model: kernels where they run, plain XLA elsewhere.
fastest_attention = partial(delta_rule_attention, implementation=("pallas", "chunkwise"))


def main() -> None:
    """Replace softmax attention: same arguments, same shape of the output."""
    shape = (2, 64, 4, 16)  # [B, T, N, H]
    q, k, v = (jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3))
    softmax = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    delta = fastest_attention(q, k, v, is_causal=True)
    print("softmax attention:", softmax.shape, "delta rule:", delta.shape)
    # One key for all tokens: the last value replaces the earlier ones, softmax averages them.
    same = jnp.broadcast_to(q[:, :1], shape)
    recalled = fastest_attention(same, same, v, scale=1.0)[:, -1]
    averaged = jax.nn.dot_product_attention(same, same, v, is_causal=True)[:, -1]
    print(f"distance to the last value, delta rule: {jnp.abs(recalled - v[:, -1]).max():.1e}")
    print(f"distance to the last value, softmax:    {jnp.abs(averaged - v[:, -1]).max():.1e}")


if __name__ == "__main__":
    main()
