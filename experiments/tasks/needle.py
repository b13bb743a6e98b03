"""A needle in a haystack: one pair of a key and a value, and much else.

The haystack is a pattern of a few tokens that repeats, or random tokens (after the two
haystacks of the retrieval tasks in Yang et al., 2024, arXiv:2412.06464). Its tokens are those
that keys and values are made of, and what is asked for is the token that followed the key; a
mark before the needle tells it from the rest, or nothing does::

    tokens    5 2 8 3 [mark] 6 4 1 8 2 ... 7 [mark] 6      target    4
    tokens    5 2 8 3    9   6 4 1 8 2 ... 7    1   6      target    4
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

__all__ = ["MARK", "PATTERN", "SHORTEST", "draw_needles", "followers"]

MARK = 0
PATTERN = 8  # tokens of a haystack that repeats
NEEDLE, QUESTION = 3, 2  # tokens
SHORTEST = NEEDLE + QUESTION


def draw_needles(
    key: jax.Array,
    batch_size: int,
    longest: int,
    vocab_size: int,
    *,
    length: jax.Array | int,
    depth: jax.Array,
    repeated: jax.Array | bool,
    marked: jax.Array | bool,
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Haystacks with a needle each, and the question as their last tokens.

    Args:
        key: Source of randomness.
        batch_size: Sequences.
        longest: Size `T` of the arrays; from `length` on they hold marks, which no earlier
            token sees.
        vocab_size: Size of the vocabulary; token 0 is the mark.
        length: Tokens of a haystack with needle and question, at least `SHORTEST`; may be
            traced.
        depth: Position of the needle as a fraction of the possible ones, `[B]` or for
            all; may be traced.
        repeated: Whether the haystack is a pattern that repeats; may be traced.
        marked: Whether a mark stands before the needle and before the question; may be traced.

    Returns:
        Tokens, and the values that are asked for after token `length - 1`.
    """
    streams = jax.random.split(key, 4)
    needle = jax.random.randint(streams[0], (batch_size,), 1, vocab_size)
    value = _other(streams[1], (batch_size, 1), needle, vocab_size)
    hay = _other(streams[2], (batch_size, longest), needle, vocab_size)
    pattern = _other(streams[3], (batch_size, PATTERN), needle, vocab_size)
    times = jnp.arange(longest)
    hay = jnp.where(repeated, pattern[:, times % PATTERN], hay)
    places = length - SHORTEST
    start = jnp.round(jnp.broadcast_to(depth, (batch_size,)) * places).astype(jnp.int32)[:, None]
    question = length - QUESTION
    tokens = jnp.where(marked & ((times == start) | (times == question)), MARK, hay)
    tokens = jnp.where((times == start + 1) | (times == question + 1), needle[:, None], tokens)
    tokens = jnp.where(times == start + 2, value, tokens)
    return jnp.where(times < length, tokens, MARK), value[:, 0]


def followers(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Find the token after the last earlier occurrence of every token, -1 where there is none."""
    times = jnp.arange(tokens.shape[1])
    earlier = (tokens[:, :, None] == tokens[:, None, :]) & (times[:, None] > times)
    last = jnp.max(jnp.where(earlier, times, -1), axis=2)
    found = jnp.take_along_axis(tokens, jnp.maximum(last, 0) + 1, axis=1)
    return jnp.where(last < 0, -1, found)


def _other(
    key: jax.Array, shape: tuple[int, int], needle: Int[Array, " B"], vocab_size: int
) -> Int[Array, "B T"]:
    """Random tokens that are neither the mark nor the key."""
    tokens = jax.random.randint(key, shape, 1, vocab_size - 1)
    return tokens + (tokens >= needle[:, None])
