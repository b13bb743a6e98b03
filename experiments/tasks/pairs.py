"""Associative retrieval (Schlag et al., 2021, arXiv:2102.11174, section 6.1).

Setting 1 (capacity): each of `N` keys is written once, with a value that no other key has.
Setting 2 (overwriting): `2N` pairs are drawn with replacement; what counts is the last value
of a key.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

__all__ = ["Pairs", "draw_pairs"]


class Pairs(NamedTuple):
    """Pairs in the order of writing, and what every key must give in the end."""

    keys: Int[Array, "B T"]
    values: Int[Array, "B T"]
    real: Bool[Array, "B T"]
    answers: Int[Array, "B N"]
    """The value of each key, -1 for a key that was not written."""


def draw_pairs(
    key: jax.Array, batch_size: int, most: int, count: jax.Array, *, rewriting: jax.Array
) -> Pairs:
    """Pairs over `count` keys and values, padded to the shapes of `most` keys.

    Args:
        key: Source of randomness.
        batch_size: Sequences.
        most: The largest number of keys; `T = 2 * most`.
        count: Number of keys, at most `most`; may be traced.
        rewriting: True for setting 2, False for setting 1; may be traced.
    """
    symbols = jnp.arange(most)

    def once(key: jax.Array) -> jax.Array:
        """The first `count` symbols in random order, then the others."""
        order = jax.random.uniform(key, (batch_size, most)) + (symbols >= count)
        return jnp.tile(jnp.argsort(order, axis=1), (1, 2))

    def again(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (batch_size, 2 * most), 0, count)

    streams = jax.random.split(key, 4)
    keys = jnp.where(rewriting, again(streams[0]), once(streams[1]))
    values = jnp.where(rewriting, again(streams[2]), once(streams[3]))
    times = jnp.arange(2 * most)
    real = jnp.broadcast_to(times < jnp.where(rewriting, 2 * count, count), keys.shape)
    written = (keys[:, :, None] == symbols) & real[:, :, None]  # [B, T, N]
    last = jnp.max(jnp.where(written, times[:, None], -1), axis=1)
    answers = jnp.where(last < 0, -1, jnp.take_along_axis(values, jnp.maximum(last, 0), axis=1))
    return Pairs(keys, values, real, answers)
