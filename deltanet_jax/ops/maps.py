"""A whole sequence as one affine map of the state, for the tokens after it."""

import jax
import jax.numpy as jnp

from deltanet_jax import compat
from deltanet_jax.core.affine import AffineMap
from deltanet_jax.core.chunk import WYForm, prepare_wy
from deltanet_jax.core.numerics import identity
from deltanet_jax.core.problem import Problem, Tokens, decay_with_resets, tokens_of, zero_state
from deltanet_jax.ops.chunkwise import DEFAULT_CHUNK, SEGMENT_TOKENS
from deltanet_jax.ops.layout import as_chunks, split_time

__all__ = ["EXACT", "sequence_map"]

# Maps are composed in full precision: their errors would multiply from one to the next.
EXACT = jax.lax.Precision.HIGHEST


def sequence_map(problem: Problem) -> AffineMap:
    """`S -> A S + B` for all tokens of a problem; its initial state plays no part.

    The map is linear in the columns of the state, so it is what the tokens make of the state
    `[I | 0]` when the values of its first `K` columns are zero. Without the delta rule `A` is
    the decay alone. Only one state per `SEGMENT_TOKENS` tokens is stored for the backward pass.
    """
    problem = problem.with_repeated_keys()
    T, K = problem.k.shape[1], problem.k.shape[-1]
    C = min(DEFAULT_CHUNK, T)
    size = max(1, min(SEGMENT_TOKENS, T) // C) * C
    segments = jax.tree.map(lambda x: split_time(x, size), tokens_of(problem))
    precision = problem.precision

    def chunk(columns: jax.Array, form: WYForm) -> tuple[jax.Array, None]:
        if form.W is not None:
            form = form._replace(U=jnp.pad(form.U, [(0, 0)] * (form.U.ndim - 1) + [(K, 0)]))
        return form.advance(columns, form.writes(columns, precision), precision), None

    def segment(columns: jax.Array, tokens: Tokens) -> tuple[jax.Array, None]:
        return jax.lax.scan(chunk, columns, prepare_wy(as_chunks(tokens, C), precision))

    segment = jax.checkpoint(segment, prevent_cse=False)
    columns: jax.Array = jax.lax.scan(segment, _start(problem), segments)[0]
    if problem.beta is not None:
        return AffineMap(columns[..., :K], columns[..., K:])
    return AffineMap(_whole_decay(problem, columns), columns)


def _start(problem: Problem) -> jax.Array:
    """`[I | 0]`, or zeros without the delta rule: `[B, HV, K, *]`."""
    start = zero_state(problem)
    if problem.beta is not None:
        unit = identity(start) + compat.zeros_like(start[..., :1])
        start = jnp.concatenate([unit, start], axis=-1)
    start = compat.shard_like(start, problem.v, (0, 2, None, None))
    return compat.vary_like(start, problem.reset, *jax.tree.leaves(problem.tokens))


def _whole_decay(problem: Problem, like: jax.Array) -> jax.Array:
    """The product of all decays, `[B, HV, K, 1]`."""
    g = decay_with_resets(problem)
    column = like[..., :1]
    if g is None:
        return jnp.ones_like(column)
    decay = jnp.exp(jnp.sum(g, axis=1))
    decay = decay[..., None] if problem.gate == "vector" else decay[..., None, None]
    return jnp.broadcast_to(decay, column.shape)
