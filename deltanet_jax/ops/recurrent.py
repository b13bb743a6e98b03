"""The recurrent algorithm: one token after another, with few states stored for the backward."""

import math

import jax
import jax.numpy as jnp

from deltanet_jax.core.problem import Problem, Tokens, start_state, tokens_of
from deltanet_jax.core.step import step
from deltanet_jax.ops.layout import scan_blocks

__all__ = ["recurrent"]


def recurrent(problem: Problem, chunk_size: int | None = None) -> tuple[jax.Array, jax.Array]:
    """A scan over tokens inside a checkpointed scan over blocks of tokens.

    The state at the start of each block is stored; the backward pass recomputes the states
    inside one block at a time. `chunk_size` is the length of a block; its default, about
    `sqrt(T)`, stores the fewest states.
    """
    problem = problem.with_repeated_keys()
    T = problem.q.shape[1]
    size = min(chunk_size or max(1, math.isqrt(T)), T)
    final_state, o = scan_blocks(_block, start_state(problem), tokens_of(problem), size)
    return (o * problem.scale).astype(problem.v.dtype), final_state


def _block(state: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    def token(state: jax.Array, x: Tokens) -> tuple[jax.Array, jax.Array]:
        o, state = step(state, x)
        return state, o

    time_first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    state, o = jax.lax.scan(token, state, time_first)
    return state, jnp.moveaxis(o, 0, 1)
