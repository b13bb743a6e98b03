"""A language model in plain JAX: parameters in a dictionary, operators as functions."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from deltanet_jax import delta_rule, l2_norm, step

__all__ = ["init", "logits", "loss", "next_logits"]

Parameters = dict[str, Any]
HEADS = 2


def init(key: Key[Array, ""], vocab: int = 32, width: int = 16, layers: int = 2) -> Parameters:
    """Draw random parameters, stacked along a leading axis of layers for `jax.lax.scan`."""
    shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
    shapes["beta"] = (width, HEADS)
    keys = dict(zip((*shapes, "table"), jax.random.split(key, len(shapes) + 1), strict=True))
    stacked = {
        name: jax.random.normal(keys[name], (layers, *shape)) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    return {"table": jax.random.normal(keys["table"], (vocab, width)), "layers": stacked}


def _heads(x: Float[Array, "B T D"], p: Parameters) -> tuple[jax.Array, ...]:
    """Compute unit queries and keys, values, and write strengths of each head."""
    q, k, v = (
        jax.nn.silu(x @ p[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("q", "k", "v")
    )
    return l2_norm(q), l2_norm(k), v, jax.nn.sigmoid(x @ p["beta"])


def logits(p: Parameters, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
    """Return logits of the next token; layers are scanned, and recomputed in the backward."""

    @jax.checkpoint
    def layer(x: jax.Array, weights: Parameters) -> tuple[jax.Array, None]:
        o, _ = delta_rule(*_heads(x, weights))
        return x + o.reshape(x.shape) @ weights["o"], None

    x, _ = jax.lax.scan(layer, p["table"][tokens], p["layers"])
    return x @ p["table"].T


def loss(p: Parameters, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Return the mean cross-entropy of the next token."""
    scores = jax.nn.log_softmax(logits(p, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def next_logits(
    p: Parameters, token: Int[Array, " B"], states: Float[Array, "L B H K V"]
) -> tuple[Float[Array, "B vocab"], Float[Array, "L B H K V"]]:
    """Decode one token: return its logits, and the states of all layers after it."""

    def layer(x: jax.Array, inputs: tuple[Parameters, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weights, state = inputs
        q, k, v, beta = (u[:, 0] for u in _heads(x[:, None], weights))
        o, state = step(q, k, v, state, beta=beta)
        return x + o.reshape(x.shape) @ weights["o"], state

    x, states = jax.lax.scan(layer, p["table"][token], (p["layers"], states))
    return x @ p["table"].T, states


def main() -> None:
    """Learn to count modulo 32 by gradient descent, then decode greedily."""
    p = init(jax.random.key(0))
    tokens = (jnp.arange(32)[:, None] + jnp.arange(24)) % 32  # every start once
    descend = jax.jit(
        lambda p: jax.tree.map(lambda x, d: x - 0.3 * d, p, jax.grad(loss)(p, tokens))
    )
    print(f"loss before: {loss(p, tokens):.3f}")
    for _ in range(200):
        p = descend(p)
    print(f"loss after:  {loss(p, tokens):.3f}")
    width = p["table"].shape[1] // HEADS
    states = jnp.zeros((p["layers"]["q"].shape[0], 1, HEADS, width, width))
    token, decoded = jnp.asarray([3]), [3]
    decode = jax.jit(next_logits)
    for _ in range(10):
        scores, states = decode(p, token, states)
        token = jnp.argmax(scores, axis=-1)
        decoded.append(int(token[0]))
    print("decoded:", decoded)


if __name__ == "__main__":
    main()
