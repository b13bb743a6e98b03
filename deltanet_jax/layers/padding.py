"""Masked tokens act as if they were absent.

The real tokens of each row are moved to its front, in order, and the results are moved back.
So one rule serves left, right and interior padding: the convolution sees the previous real
tokens, chunks fall where they would fall without padding, and what the recurrence must not
see is all at the end of the row, where it is a token that changes nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

__all__ = ["Packing", "pack", "runs_of"]


class Packing(NamedTuple):
    """Positions of the real tokens of each row in packed order."""

    order: Int[Array, "B T"]  # position that each packed token comes from
    inverse: Int[Array, "B T"]  # position that each token goes to
    lengths: Int[Array, " B"]  # number of real tokens

    @property
    def real(self) -> Bool[Array, "B T"]:
        """Mask of the real packed tokens."""
        return jnp.arange(self.order.shape[1])[None] < self.lengths[:, None]

    def zero_padding(self, x: jax.Array) -> jax.Array:
        """`x` in packed order with zeros where no real token is, NaN included."""
        return jnp.where(_like(self.real, x), x, 0)

    def gather(self, x: jax.Array) -> jax.Array:
        """Reorder from positions to packed order; padding becomes zero."""
        return self.zero_padding(_take(x, self.order))

    def scatter(self, x: jax.Array) -> jax.Array:
        """Reorder from packed order back to positions; padding is zero."""
        return _take(self.zero_padding(x), self.inverse)


def pack(mask: Bool[Array, "B T"]) -> Packing:
    """The packing of the tokens where `mask` is True."""
    order = jnp.argsort(~mask, axis=1, stable=True)
    return Packing(order, jnp.argsort(order, axis=1), jnp.sum(mask, axis=1, dtype=jnp.int32))


def runs_of(segment_ids: Int[Array, "B T"], packing: Packing | None = None) -> Int[Array, "B T"]:
    """Number of the run of equal ids that each (packed) token belongs to, counting from 0.

    An id that comes back after another is a new run. The padding behind the real tokens
    continues the last run, so that the final state is theirs.
    """
    if packing is not None:
        segment_ids = _take(segment_ids, packing.order)
    new = segment_ids[:, 1:] != segment_ids[:, :-1]
    if packing is not None:
        new = new & packing.real[:, 1:]
    return jnp.cumsum(jnp.pad(new, [(0, 0), (1, 0)])[:, : segment_ids.shape[1]], axis=1)


def _take(x: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, _like(positions, x), axis=1)


def _like(per_token: jax.Array, x: jax.Array) -> jax.Array:
    """A `[B, T]` array with axes of one for the further axes of `x`."""
    return per_token.reshape(per_token.shape + (1,) * (x.ndim - 2))
