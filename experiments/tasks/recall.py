"""Multi-query associative recall (Arora et al., 2023, "Zoology", arXiv:2312.04927).

With keys 1 to 4, values 5 to 9 and two pairs::

    tokens    1  7  3  5  3  0  1  0  0  0
    targets   .  .  .  .  5  .  7  .  .  .
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

__all__ = ["draw_recall", "longest_list"]

POWER = 0.01  # of the law that queries are placed by: most come soon after the pairs


def longest_list(length: int, vocab_size: int) -> int:
    """The most pairs that a sequence has room for, and that the vocabulary has keys for."""
    return min(length // 4, vocab_size // 2 - 1)


def draw_recall(
    key: jax.Array, length: int, vocab_size: int, counts: Int[Array, " B"]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Pairs of a key and a value, then every key once more among zeros.

    Keys and values are distinct and drawn from the two halves of the vocabulary, the token 0
    left out. The rest of the sequence is places of two tokens; those of the queries are drawn
    without replacement, place `x` (from 1) with a probability in proportion to `x^(0.01 - 1)`.

    Args:
        key: Source of randomness.
        length: Tokens `T` of each sequence.
        vocab_size: Size of the vocabulary.
        counts: Pairs of each sequence, at most `longest_list(length, vocab_size)`.

    Returns:
        Tokens, and at every query the value of its key; the other targets are -1.
    """
    most, half, batch_size = longest_list(length, vocab_size), vocab_size // 2, len(counts)
    count = counts[:, None]
    streams = jax.random.split(key, 3)
    keys = 1 + _distinct(streams[0], batch_size, half - 1, most)
    values = half + _distinct(streams[1], batch_size, vocab_size - half, most)
    places = jnp.arange(length // 2)
    weights = jnp.where(places < length // 2 - count, (POWER - 1) * jnp.log1p(places), -jnp.inf)
    # Sorting by log-weights and Gumbel noise is drawing one after another.
    noise = jax.random.gumbel(streams[2], (batch_size, length // 2))
    chosen = jnp.argsort(-(weights + noise), axis=1)[:, :most]
    pairs = jnp.arange(most)
    rows = jnp.arange(batch_size)[:, None]

    def put(x: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
        # What is past the end is dropped.
        return x.at[rows, jnp.where(pairs < count, at, length)].set(new, mode="drop")

    asked = 2 * (count + chosen)
    empty = jnp.zeros((batch_size, length), jnp.int32)
    tokens = put(put(empty, 2 * pairs, keys), 2 * pairs + 1, values)
    return put(tokens, asked, keys), put(empty - 1, asked, values)


def _distinct(key: jax.Array, batch_size: int, symbols: int, count: int) -> Int[Array, "B N"]:
    """The first symbols of a random order of all."""
    noise = jax.random.uniform(key, (batch_size, symbols))
    return jnp.argsort(noise, axis=1)[:, :count].astype(jnp.int32)
