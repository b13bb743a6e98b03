"""Sampling from a model at constant memory."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from deltanet_jax.core import checks
from deltanet_jax.layers.checks import check_per_token, check_vocabulary
from deltanet_jax.models.delta_net_lm import DeltaNetLM, LMCache

__all__ = ["check_key", "check_sampling", "generate", "last_real", "sample"]

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
    key: Key[Array, ""] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> Int[Array, "B num_tokens"]:
    """Continue a prompt: read it at once, then sample one token after another.

    Args:
        model: The model.
        prompt: Tokens, `[B, T]`, `T >= 1`.
        num_tokens: Number of tokens to sample.
        key: Source of randomness; needed unless `temperature` is 0.
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
    num_tokens = checks.whole("num_tokens", num_tokens, least=0)
    static = _Sampling(num_tokens, *check_sampling(temperature, top_k, model.config.vocab_size))
    key = check_key(key, static.temperature)
    prompt, mask = _check_prompt(prompt, mask, model.config.vocab_size)
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


def check_sampling(temperature: object, top_k: object, vocab_size: int) -> tuple[float, int | None]:
    """Return temperature and `top_k` as plain numbers."""
    number = checks.number("temperature", temperature, least=0)
    return number, checks.optional(checks.whole, "top_k", top_k, least=1, most=vocab_size)


def check_key(key: Key[Array, ""] | None, temperature: float) -> Key[Array, ""]:
    """Return the key; any will do where nothing is drawn."""
    if key is None and temperature != 0:
        raise ValueError("`key` is required unless `temperature` is 0; got None")
    return jax.random.key(0) if key is None else key


def _check_prompt(
    prompt: object, mask: object, vocab_size: int
) -> tuple[jax.Array, jax.Array | None]:
    """Return prompt and mask; every row must hold a token, and known tokens a meaning."""
    tokens = checks.integer_array("prompt", prompt, "[B, T]")
    if tokens.shape[1] == 0:
        raise ValueError(f"`prompt` must be [B, T] with T >= 1; got {tokens.shape}")
    real = check_per_token("mask", mask, tokens.shape, np.bool_)
    values = None if real is None else checks.known(real)
    if values is not None and not values.any(axis=1).all():
        empty = np.flatnonzero(~values.any(axis=1)).tolist()
        raise ValueError(f"`mask` must leave a token in every row; rows {empty} have none")
    check_vocabulary("prompt", tokens, real, vocab_size)
    return jnp.asarray(tokens), real


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
