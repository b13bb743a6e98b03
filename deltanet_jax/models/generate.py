"""Sampling from a model at constant memory."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from deltanet_jax.models.delta_net_lm import DeltaNetLM, LMCache

__all__ = ["check_sampling", "generate", "last_real", "sample"]

_Carry = tuple[jax.Array, LMCache]


class _Sampling(NamedTuple):
    """Static arguments of a sampling loop."""

    num_tokens: int
    temperature: float
    top_k: int | None


def generate(
    model: DeltaNetLM,
    prompt: Int[Array, "B T"],
    num_tokens: int,
    *,
    key: Key[Array, ""],
    temperature: float = 1.0,
    top_k: int | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> Int[Array, "B num_tokens"]:
    """Continue a prompt: read it at once, then sample one token after another.

    Args:
        model: The model.
        prompt: Tokens, `[B, T]`, `T >= 1`.
        num_tokens: Number of tokens to sample.
        key: Source of randomness.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among this many most likely tokens; among all by default.
        mask: True for real tokens of the prompt, on either side of its padding; every row
            needs at least one.

    Returns:
        The sampled tokens, without the prompt.

    Raises:
        ValueError: If an argument is out of range; the message names it.

    Example:
        >>> config = DeltaNetConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2)
        >>> model = DeltaNetLM(config, rngs=nnx.Rngs(0))
        >>> generate(model, jnp.asarray([[1, 2, 3]]), 5, key=jax.random.key(0), top_k=3).shape
        (1, 5)
    """
    if getattr(prompt, "ndim", None) != 2 or prompt.shape[1] == 0:
        raise ValueError(f"`prompt` must be [B, T] with T >= 1; got {jnp.shape(prompt)}")
    if num_tokens < 0:
        raise ValueError(f"`num_tokens` must be >= 0; got {num_tokens}")
    check_sampling(temperature, top_k, model.config.vocab_size)
    static = _Sampling(num_tokens, float(temperature), top_k)
    graph, state = nnx.split(model)
    tokens: jax.Array = _generate(state, prompt, mask, key, graph=graph, how=static)
    return tokens


def sample(
    logits: Float[Array, "B vocab"], key: Key[Array, ""], temperature: float, top_k: int | None
) -> Int[Array, " B"]:
    """Sample one token per row."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    if top_k is None:
        return jax.random.categorical(key, logits / temperature)
    # Sampling among ranks keeps exactly `top_k` tokens where logits are equal.
    best, token = jax.lax.top_k(logits, top_k)
    rank = jax.random.categorical(key, best / temperature)
    return jnp.take_along_axis(token, rank[:, None], axis=1)[:, 0]


def check_sampling(temperature: float, top_k: int | None, vocab: int) -> None:
    if not temperature >= 0:
        raise ValueError(f"`temperature` must be >= 0; got {temperature}")
    if top_k is not None and not 1 <= top_k <= vocab:
        raise ValueError(f"`top_k` must be in [1, vocab_size={vocab}] or None; got {top_k}")


@partial(jax.jit, static_argnames=("graph", "how"))
def _generate(
    state: nnx.State[Any, Any],
    prompt: Int[Array, "B T"],
    mask: Bool[Array, "B T"] | None,
    key: Key[Array, ""],
    *,
    graph: nnx.GraphDef[DeltaNetLM],
    how: _Sampling,
) -> Int[Array, "B num_tokens"]:
    model = nnx.merge(graph, state)
    x, cache = model.read(prompt, model.init_cache(prompt.shape[0]), mask=mask)
    # Logits of the whole prompt would take `T * vocab` floats a row.
    last = model.logits(x[:, -1:] if mask is None else last_real(x, mask))[:, 0]

    def decode(carry: _Carry, key: Key[Array, ""]) -> tuple[_Carry, Int[Array, " B"]]:
        logits, cache = carry
        token = sample(logits, key, how.temperature, how.top_k)
        logits, cache = model.extend(token[:, None], cache)
        return (logits[:, 0], cache), token

    _, tokens = jax.lax.scan(decode, (last, cache), jax.random.split(key, how.num_tokens))
    return tokens.T


def last_real(x: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> Float[Array, "B 1 D"]:
    """The features of the last real token of each row."""
    last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)
