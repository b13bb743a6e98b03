"""The chunkwise algorithms in plain XLA: parallel inside chunks, serial across them.

Both store only one state per segment or chunk for the backward pass and compute the rest
again, so temporary memory does not grow with what a chunk needs. Where memory is given, form 2
prepares more at a time, or the whole sequence, and then computes nothing twice.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.core.chunk import WYForm, prepare_wy, read, write
from deltanet_jax.core.chunk_solve import solve_chunk
from deltanet_jax.core.problem import Problem, Tokens, start_state, tokens_of
from deltanet_jax.ops.layout import (
    as_chunks,
    each_chunk,
    from_chunks,
    scan_blocks,
)

__all__ = ["chunkwise", "chunkwise_solve"]

DEFAULT_CHUNK = 64
SEGMENT_TOKENS = 512  # of all chunks that form 2 prepares together
PAIRS_FROM = 16  # chunks, from which on form 1 stores the state before every second one

State = Float[Array, "B H K V"]
Precision = jax.lax.Precision | None
Block = Callable[..., tuple[State, jax.Array]]


def chunkwise(
    problem: Problem, chunk_size: int | None = None, *, prepared: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Form 2 (WY): `W` and `U` of many chunks in parallel, two products per chunk in series.

    `prepared` is how many values of keys and values memory is given for. A segment is as long as
    that allows, and at least `SEGMENT_TOKENS`; a whole sequence within it is kept as it is.
    """
    problem = problem.with_repeated_keys()
    B, T, HV, V = problem.v.shape
    C = min(chunk_size or DEFAULT_CHUNK, T)
    row = B * HV * (problem.k.shape[-1] + V)
    segment = min(max(SEGMENT_TOKENS, prepared // max(row, 1)), T)
    block = partial(_wy_segment, chunk_size=C)
    if segment == T and row * T <= prepared:
        body = partial(_rounded, problem, block)
        final_state, o = body(start_state(problem), tokens_of(problem))
        return o[:, :T], final_state
    return _scan_blocks(problem, max(1, segment // C) * C, block)


def chunkwise_solve(problem: Problem, chunk_size: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Form 1: each chunk's triangular system is solved with the state that comes in."""
    T = problem.q.shape[1]
    C = min(chunk_size or DEFAULT_CHUNK, T)
    chunks = 2 if T >= PAIRS_FROM * C else 1
    return _scan_blocks(problem, chunks * C, partial(_solve_chunks, chunk_size=C))


def _scan_blocks(problem: Problem, size: int, block: Block) -> tuple[jax.Array, jax.Array]:
    """Pass the state through blocks of `size` tokens; only it is stored for the backward pass."""
    problem = problem.with_repeated_keys()
    body = partial(_rounded, problem, block)
    final_state, o = scan_blocks(body, start_state(problem), tokens_of(problem), size)
    return o, final_state


def _rounded(
    problem: Problem, block: Block, state: State, tokens: Tokens
) -> tuple[State, jax.Array]:
    """One block, scaled and rounded: no pass over the whole output in the wider type."""
    state, o = block(state, tokens, precision=problem.precision)
    return state, (o * problem.scale).astype(problem.v.dtype)


def _solve_chunks(
    state: State, tokens: Tokens, *, chunk_size: int, precision: Precision
) -> tuple[State, jax.Array]:
    """One chunk after another, from tokens `[B, T, H, *]`."""
    outputs = []
    for chunk in each_chunk(tokens, chunk_size):
        if chunk.beta is None:
            o = read(chunk, state, chunk.v, precision)
            state = write(chunk, state, chunk.v, precision)
        else:
            state, o = solve_chunk(chunk, state, precision)
        outputs.append(jnp.swapaxes(o, 1, 2))
    return state, jnp.concatenate(outputs, axis=1)


def _wy_segment(
    state: State, tokens: Tokens, *, chunk_size: int, precision: Precision
) -> tuple[State, jax.Array]:
    """One segment: prepare all its chunks, pass the state through them, read all outputs."""
    chunks = as_chunks(tokens, chunk_size)
    with jax.named_scope("prepare"):
        form = prepare_wy(chunks, precision)

    def advance(state: State, form: WYForm) -> tuple[State, tuple[State, jax.Array]]:
        writes = form.writes(state, precision)
        return form.advance(state, writes, precision), (state, writes)

    with jax.named_scope("states"):
        state, (states, writes) = jax.lax.scan(advance, state, form)
    with jax.named_scope("outputs"):
        return state, from_chunks(read(chunks, states, writes, precision))
