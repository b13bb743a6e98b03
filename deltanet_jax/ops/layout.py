"""Cutting the time axis: blocks of tokens for a scan, chunks for the chunk algebra."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.core.problem import Tokens

__all__ = [
    "as_chunks",
    "each_chunk",
    "from_chunks",
    "scan_blocks",
    "split_time",
]


def split_time(x: Float[Array, "B T *rest"], size: int) -> Float[Array, "M B size *rest"]:
    """Blocks of `size` tokens on a leading axis, the last one padded with zeros.

    A token of zeros is a no-op for every variant: it writes nothing and decays nothing.
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


def scan_blocks(
    body: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],
    state: jax.Array,
    tokens: Any,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Pass a state through blocks of `size` tokens; only it is stored for the backward pass.

    `body(state, block)` gets the arrays of `tokens`, `[B, T, ...]`, cut to `[B, size, ...]`, and
    returns the next state and an output `[B, size, ...]`; the outputs come back as `[B, T, ...]`.
    """
    B, T = jax.tree.leaves(tokens)[0].shape[:2]

    # For a batch of one the loop's arrays have no batch axis: XLA copies each of them to move
    # one, even of length 1, to where the loop wants it.
    def split(x: jax.Array) -> jax.Array:
        blocks = split_time(x, size)
        return blocks.reshape(blocks.shape[0], *blocks.shape[2:]) if B == 1 else blocks

    def step(state: jax.Array, block: Any) -> tuple[jax.Array, jax.Array]:
        if B == 1:
            block = jax.tree.map(lambda x: x[None], block)
        state, o = body(state, block)
        return state, o[0] if B == 1 else o

    step = jax.checkpoint(step, prevent_cse=False)
    state, o = jax.lax.scan(step, state, jax.tree.map(split, tokens))
    return state, join_time(o[:, None] if B == 1 else o)[:, :T]


def as_chunks(tokens: Tokens, chunk_size: int) -> Tokens:
    """`[B, N*C, H, *]` as chunks `[N, B, H, C, *]`, the last one padded."""

    def split(x: jax.Array) -> Float[Array, "N B H C D"]:
        return jnp.swapaxes(split_time(x, chunk_size), 2, 3)

    chunks: Tokens = jax.tree.map(split, tokens)
    return chunks


def each_chunk(tokens: Tokens, chunk_size: int) -> list[Tokens]:
    """The chunks `[B, H, C, *]` of tokens `[B, N*C, H, *]`, cut so that gradients are joined.

    The gradient of an index into all chunks would be a sum of arrays padded with zeros.
    """
    count = tokens.q.shape[1] // chunk_size
    fields, structure = jax.tree.flatten(tokens)
    parts = [jnp.split(x, count, axis=1) for x in fields]
    chunks = [[jnp.swapaxes(x, 1, 2) for x in chunk] for chunk in zip(*parts, strict=True)]
    return [jax.tree.unflatten(structure, chunk) for chunk in chunks]


def from_chunks(o: Float[Array, "N B H C V"]) -> Float[Array, "B T H V"]:
    """The outputs of chunks on one time axis, padding included."""
    return join_time(jnp.swapaxes(o, 2, 3))
