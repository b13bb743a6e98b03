"""Cutting the time axis: segments for the outer scan, chunks inside them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.core.chunk import Chunk

__all__ = ["as_chunk", "join_time", "split_time"]


def split_time(x: Float[Array, "B T *rest"], size: int) -> Float[Array, "M B size *rest"]:
    """Pad time with zeros to a multiple of `size` and put the pieces on a leading axis.

    A token of zeros is a no-op for every member: it writes nothing and decays nothing.
    """
    B, T, *rest = x.shape
    pieces = -(-T // size)
    if pieces * size != T:
        x = jnp.pad(x, [(0, 0), (0, pieces * size - T)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x.reshape(B, pieces, size, *rest), 1, 0)


def join_time(x: Float[Array, "M B size *rest"]) -> Float[Array, "B T *rest"]:
    """Inverse of `split_time`, padding included."""
    M, B, size, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(B, M * size, *rest)


def as_chunk(tokens: tuple[jax.Array | None, ...], chunk_size: int) -> Chunk:
    """`(q, k, v, g, beta)` of `[B, N*C, H, *]` as chunks `[N, B, H, C, *]`."""
    return Chunk(*(None if x is None else _split(x, chunk_size) for x in tokens))


def _split(x: jax.Array, chunk_size: int) -> Float[Array, "N B H C D"]:
    if x.ndim == 3:
        x = x[..., None]
    B, T, H, D = x.shape
    x = x.reshape(B, T // chunk_size, chunk_size, H, D)
    return x.transpose(1, 0, 3, 2, 4)
