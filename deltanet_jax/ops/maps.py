"""A whole sequence as one affine map of the state: what is left of it for what comes after."""

import jax
import jax.numpy as jnp

from deltanet_jax import compat
from deltanet_jax.core.affine import AffineMap, compose
from deltanet_jax.core.chunk import Chunk, chunk_map, prepare_wy
from deltanet_jax.core.recurrence import Problem, accumulation_dtype
from deltanet_jax.ops.chunkwise import DEFAULT_CHUNK, SEGMENT_TOKENS
from deltanet_jax.ops.layout import as_chunks, map_tokens, split_time, tokens_of

__all__ = ["sequence_map"]

# Maps are composed in full precision: their errors would multiply from one to the next.
EXACT = jax.lax.Precision.HIGHEST


def sequence_map(problem: Problem) -> AffineMap:
    """`S_0 -> S_T` for all tokens of a problem; its initial state plays no part.

    Chunks are reduced to their maps, and these composed in order. Only one map per
    `SEGMENT_TOKENS` tokens is kept for the backward pass.
    """
    problem = problem.with_repeated_keys()
    C = min(DEFAULT_CHUNK, problem.q.shape[1])
    segments = map_tokens(lambda x: split_time(x, _segment(problem, C)), tokens_of(problem))

    def body(total: AffineMap, tokens: Chunk) -> tuple[AffineMap, None]:
        maps = chunk_map(
            prepare_wy(as_chunks(tokens, C), problem.precision), problem.precision
        )  # [N, B, H, K, *]
        return jax.lax.scan(lambda t, m: (compose(t, m, EXACT), None), total, maps)

    body = jax.checkpoint(body, prevent_cse=False)
    return jax.lax.scan(body, _identity(problem), segments)[0]


def _segment(problem: Problem, C: int) -> int:
    return max(1, min(SEGMENT_TOKENS, problem.q.shape[1]) // C) * C


def _identity(problem: Problem) -> AffineMap:
    B, _, HV, V = problem.v.shape
    K = problem.k.shape[-1]
    acc = accumulation_dtype(problem.q, problem.k, problem.v)
    A = jnp.ones((K, 1), acc) if problem.beta is None else jnp.eye(K, dtype=acc)
    map_ = AffineMap(jnp.broadcast_to(A, (B, HV, *A.shape)), jnp.zeros((B, HV, K, V), acc))
    inputs = (problem.k, problem.v, problem.g, problem.beta, problem.reset)
    varied: AffineMap = jax.tree.map(lambda x: compat.vary_like(x, *inputs), map_)
    return varied
