"""The chunkwise forms in plain XLA: parallel inside chunks, serial across them.

The sequence is cut into segments of several chunks. Inside a segment everything that does
not depend on the state is computed for all its chunks at once; only the segment's incoming
state is kept for the backward pass, which prepares the segment again.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from deltanet_jax.core.chunk import (
    Chunk,
    SolveForm,
    WYForm,
    prepare_solve,
    prepare_wy,
    read,
)
from deltanet_jax.core.recurrence import Problem, decay_with_resets, start_state
from deltanet_jax.ops.layout import as_chunk, join_time, split_time

__all__ = ["chunkwise", "chunkwise_solve"]

DEFAULT_CHUNK = 64
SEGMENT_TOKENS = 512  # of all chunks prepared together

Prepare = Callable[[Chunk, jax.lax.Precision | None], WYForm | SolveForm]


def chunkwise(problem: Problem, chunk_size: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Form 2 (WY): `W` and `U` of all chunks in parallel, two products per chunk in series."""
    return _run(problem, chunk_size, prepare_wy)


def chunkwise_solve(
    problem: Problem, chunk_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Form 1: the triangular system is applied to the error under the incoming state."""
    return _run(problem, chunk_size, prepare_solve)


def _run(
    problem: Problem, chunk_size: int | None, prepare: Prepare
) -> tuple[jax.Array, jax.Array]:
    problem = problem.with_repeated_keys()
    T = problem.q.shape[1]
    C = min(chunk_size or DEFAULT_CHUNK, T)
    chunks = max(1, min(SEGMENT_TOKENS, T) // C)
    tokens = (problem.q, problem.k, problem.v, decay_with_resets(problem), problem.beta)
    segments = jax.tree.map(partial(split_time, size=chunks * C), tokens)
    body = jax.checkpoint(
        partial(_segment, chunk_size=C, prepare=prepare, precision=problem.precision),
        prevent_cse=False,
    )
    final_state, o = jax.lax.scan(body, start_state(problem), segments)
    o = join_time(o)[:, :T] * problem.scale
    return o.astype(problem.v.dtype), final_state


def _segment(
    state: jax.Array,
    tokens: tuple[jax.Array | None, ...],
    *,
    chunk_size: int,
    prepare: Prepare,
    precision: jax.lax.Precision | None,
) -> tuple[jax.Array, jax.Array]:
    """One segment: prepare all chunks, pass the state through them, read all outputs."""
    chunk = as_chunk(tokens, chunk_size)
    with jax.named_scope("prepare"):
        form = prepare(chunk, precision)

    def advance(state: jax.Array, form: WYForm | SolveForm) -> tuple[jax.Array, tuple]:
        writes = form.writes(state, precision)
        return form.advance(state, writes, precision), (state, writes)

    with jax.named_scope("states"):
        state, (states, writes) = jax.lax.scan(advance, state, form)
    with jax.named_scope("outputs"):
        o = read(chunk, states, writes, precision)  # [N, B, H, C, V]
    N, B, H, C, V = o.shape
    return state, o.transpose(1, 0, 3, 2, 4).reshape(B, N * C, H, V)
