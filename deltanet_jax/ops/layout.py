"""Cutting the time axis: blocks of tokens for a scan, chunks for the chunk algebra."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.core.chunk import Chunk
from deltanet_jax.core.recurrence import Problem, decay_with_resets

__all__ = ["as_chunks", "from_chunks", "join_time", "map_tokens", "split_time", "tokens_of"]


def split_time(x: Float[Array, "B T *rest"], size: int) -> Float[Array, "M B size *rest"]:
    """Blocks of `size` tokens on a leading axis, the last one padded with zeros.

    A token of zeros is a no-op for every member: it writes nothing and decays nothing.
    """
    B, T, *rest = x.shape
    if T % size:
        x = jnp.pad(x, [(0, 0), (0, -T % size)] + [(0, 0)] * len(rest))
    # The count is spelled out: an empty batch leaves nothing to infer a -1 from.
    return jnp.moveaxis(x.reshape(B, -(-T // size), size, *rest), 1, 0)


def join_time(x: Float[Array, "M B size *rest"]) -> Float[Array, "B T *rest"]:
    """Inverse of `split_time`, padding included."""
    M, B, size, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(B, M * size, *rest)


def map_tokens(function: Callable[[jax.Array], jax.Array], tokens: Chunk) -> Chunk:
    """Apply `function` to every array of a chunk."""
    q, k, v, g, beta = tokens
    return Chunk(
        function(q),
        function(k),
        function(v),
        None if g is None else function(g),
        None if beta is None else function(beta),
    )


def tokens_of(problem: Problem) -> Chunk:
    """The problem's tokens, time on axis 1, with gates as columns."""
    g, beta = decay_with_resets(problem), problem.beta
    columns = [x if x is None or x.ndim == 4 else x[..., None] for x in (g, beta)]
    return Chunk(problem.q, problem.k, problem.v, *columns)


def as_chunks(tokens: Chunk, chunk_size: int) -> Chunk:
    """`[B, N*C, H, *]` as chunks `[N, B, H, C, *]`, the last one padded."""

    def split(x: jax.Array) -> Float[Array, "N B H C D"]:
        return jnp.swapaxes(split_time(x, chunk_size), 2, 3)

    return map_tokens(split, tokens)


def from_chunks(o: Float[Array, "N B H C V"]) -> Float[Array, "B T H V"]:
    """The outputs of chunks on one time axis, padding included."""
    return join_time(jnp.swapaxes(o, 2, 3))
