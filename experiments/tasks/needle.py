"""A needle in a haystack: one marked pair of a key and a value, and much else.

The haystack is a pattern of a few tokens that repeats, or random tokens (after the two
haystacks of the retrieval tasks in Yang et al., 2024, arXiv:2412.06464). Its tokens are those
that keys and values are made of, so that only the mark tells the needle from it::

    tokens    5 2 8 3 [mark] 6 4 1 8 2 ... 7 [mark] 6      target    4
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

__all__ = ["MARK", "PATTERN", "SHORTEST", "draw_needles"]

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
    repeated: Bool[Array, " B"],
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Haystacks with a needle each, and the question as their last tokens.

    Args:
        key: Source of randomness.
        batch_size: Sequences.
        longest: Size `T` of the arrays; from `length` on they hold marks, which no earlier
            token sees.
        vocab_size: Tokens that there are; 0 is the mark.
        length: Tokens of a haystack with needle and question, at least `SHORTEST`; may be
            traced.
        depth: Where the needle begins, a fraction of the places that there are, `[B]` or for
            all; may be traced.
        repeated: Whether the haystack is a pattern that repeats.

    Returns:
        Tokens, and the values that are asked for after token `length - 1`.
    """
    streams = jax.random.split(key, 4)
    needle = jax.random.randint(streams[0], (batch_size,), 1, vocab_size)
    value = jax.random.randint(streams[1], (batch_size,), 1, vocab_size)
    hay = _other(streams[2], (batch_size, longest), needle, vocab_size)
    pattern = _other(streams[3], (batch_size, PATTERN), needle, vocab_size)
    times = jnp.arange(longest)
    hay = jnp.where(repeated[:, None], pattern[:, times % PATTERN], hay)
    places = length - SHORTEST
    start = jnp.round(jnp.broadcast_to(depth, (batch_size,)) * places).astype(jnp.int32)[:, None]
    mark = jnp.full((batch_size, 1), MARK)
    tokens = hay
    for offset, token in enumerate((mark, needle[:, None], value[:, None])):
        tokens = jnp.where(times == start + offset, token, tokens)
    for offset, token in enumerate((mark, needle[:, None])):
        tokens = jnp.where(times == length - QUESTION + offset, token, tokens)
    return jnp.where(times < length, tokens, MARK), value


def _other(
    key: jax.Array, shape: tuple[int, int], needle: Int[Array, " B"], vocab_size: int
) -> Int[Array, "B T"]:
    """Random tokens that are neither the mark nor the key."""
    tokens = jax.random.randint(key, shape, 1, vocab_size - 1)
    return tokens + (tokens >= needle[:, None])
