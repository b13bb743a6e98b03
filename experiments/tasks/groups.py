"""Word problems: the running product of the elements of a group.

Parity is the word problem of the group of two elements. The six permutations of three things
form the smallest group in which order matters.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

__all__ = ["GROUPS", "group_words"]


def _permutations(n: int) -> np.ndarray:
    """The table `a b` of the permutations of `n` things; the first is the identity."""
    elements = list(itertools.permutations(range(n)))
    index = {element: i for i, element in enumerate(elements)}
    return np.asarray(
        [[index[tuple(a[i] for i in b)] for b in elements] for a in elements], np.int32
    )


# Multiplication tables; element 0 is the identity.
GROUPS: dict[str, np.ndarray] = {"parity": _permutations(2), "S3": _permutations(3)}


def group_words(
    key: jax.Array, group: str, batch_size: int, length: int, parts: int = 1
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Random words, and the product of each word's beginning at every element.

    Args:
        key: Source of randomness.
        group: A name in `GROUPS`.
        batch_size: Words.
        length: Elements of each.
        parts: Tokens per element, `T = length * parts`: part `j` of element `a` of a group of
            `n` is the token `a + j n`. The product is asked for at the last part, and the other
            targets are -1.
    """
    table = jnp.asarray(GROUPS[group])
    words = jax.random.randint(key, (batch_size, length), 0, len(table))
    products = jax.lax.associative_scan(lambda a, b: table[a, b], words, axis=1)
    tokens = words[..., None] + len(table) * jnp.arange(parts)
    targets = jnp.where(jnp.arange(parts) == parts - 1, products[..., None], -1)
    return tokens.reshape(batch_size, -1), targets.reshape(batch_size, -1)
