"""A language model in plain JAX: parameters in a dictionary, operators as functions."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from deltanet_jax import delta_rule, step

__all__ = ["init", "logits", "loss", "next_logits"]

Parameters = dict[str, Any]
HEADS = 2


def init(key: Key[Array, ""], vocab: int = 32, width: int = 16, layers: int = 2) -> Parameters:
    """Random parameters; one more axis in front for the layers, so that they can be scanned."""
    shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
    shapes["beta"] = (width, HEADS)
    keys = dict(zip((*shapes, "table"), jax.random.split(key, len(shapes) + 1), strict=True))
    stacked = {
        name: jax.random.normal(keys[name], (layers, *shape)) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    return {"table": jax.random.normal(keys["table"], (vocab, width)), "layers": stacked}


def _heads(x: Float[Array, "B T D"], p: Parameters) -> tuple[jax.Array, ...]:
    """Queries, unit keys and values per head, and write strengths."""
    q, k, v = (
        jax.nn.silu(x @ p[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("q", "k", "v")
    )
    q, k = (u * jax.lax.rsqrt(jnp.sum(u * u, -1, keepdims=True) + 1e-6) for u in (q, k))
    return q, k, v, jax.nn.sigmoid(x @ p["beta"])


def logits(p: Parameters, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
    """Logits of the next token, the layers under one scan and recomputed in the backward."""

    @jax.checkpoint
    def layer(x: jax.Array, weights: Parameters) -> tuple[jax.Array, None]:
        o, _ = delta_rule(*_heads(x, weights))
        return x + o.reshape(x.shape) @ weights["o"], None

    x, _ = jax.lax.scan(layer, p["table"][tokens], p["layers"])
    return x @ p["table"].T


def loss(p: Parameters, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean cross-entropy of the next token; `jax.grad` and any optimiser do the rest."""
    scores = jax.nn.log_softmax(logits(p, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def next_logits(
    p: Parameters, token: Int[Array, " B"], states: Float[Array, "L B H K V"]
) -> tuple[Float[Array, "B vocab"], Float[Array, "L B H K V"]]:
    """One token of decoding: its logits, and the states of all layers after it."""

    def layer(x: jax.Array, inputs: tuple[Parameters, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weights, state = inputs
        q, k, v, beta = (u[:, 0] for u in _heads(x[:, None], weights))
        o, state = step(q, k, v, state, beta=beta)
        return x + o.reshape(x.shape) @ weights["o"], state

    x, states = jax.lax.scan(layer, p["table"][token], (p["layers"], states))
    return x @ p["table"].T, states
