"""The associative scan over the affine maps of tokens, or of chunks."""

from functools import partial

import jax
import jax.numpy as jnp

from deltanet_jax.core.affine import AffineMap, apply, compose, token_maps
from deltanet_jax.core.chunk import chunk_map, prepare_wy, read
from deltanet_jax.core.numerics import dot
from deltanet_jax.core.problem import Problem, start_state, tokens_of
from deltanet_jax.ops.layout import as_chunks, from_chunks

__all__ = ["associative", "associative_chunks", "numbers_in_chunk_maps"]

DEFAULT_CHUNK = 64  # of `associative_chunks`


def associative(problem: Problem, chunk_size: int | None = None) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.associative_scan` with the combine `(A2 A1, A2 B1 + B2)`.

    By default it scans the maps of single tokens, the textbook way: every prefix product, a
    `K x K` and a `K x V` matrix per token and head, is formed and stored. With `chunk_size`
    above 1 the same operator runs over the maps of chunks.
    """
    problem = problem.with_repeated_keys()
    if chunk_size is None or chunk_size == 1:
        o, final_state = _over_tokens(problem)
    else:
        o, final_state = _over_chunks(problem, min(chunk_size, problem.q.shape[1]))
    return (o * problem.scale).astype(problem.v.dtype), final_state


def associative_chunks(
    problem: Problem, chunk_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The scan over the maps of chunks, of 64 tokens by default."""
    return associative(problem, chunk_size or DEFAULT_CHUNK)


def numbers_in_chunk_maps(problem: Problem, chunk_size: int | None) -> int:
    """Count values in all chunk maps; the scan and its derivative hold about ten times that."""
    B, T, HV, V = problem.v.shape
    K = problem.k.shape[-1]
    return B * HV * -(-T // (chunk_size or DEFAULT_CHUNK)) * K * (K + V)


def _prefix_states(
    maps: AffineMap, start: jax.Array, axis: int, precision: jax.lax.Precision | None
) -> jax.Array:
    """The state after each map along `axis`."""
    combine = partial(compose, precision=precision)
    prefixes = jax.lax.associative_scan(combine, maps, axis=axis)
    return apply(prefixes, jnp.expand_dims(start, axis), precision)


def _over_tokens(problem: Problem) -> tuple[jax.Array, jax.Array]:
    start = start_state(problem)
    tokens = tokens_of(problem)
    q, k, v = (x.astype(start.dtype) for x in (tokens.q, tokens.k, tokens.v))
    maps = token_maps(k, v, tokens.g, tokens.beta)
    states = _prefix_states(maps, start, 1, problem.precision)
    o = dot("bthk,bthkv->bthv", q, states, problem.precision)
    return o, states[:, -1]


def _over_chunks(problem: Problem, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    chunks = as_chunks(tokens_of(problem), chunk_size)
    form = prepare_wy(chunks, problem.precision)
    start = start_state(problem)
    after = _prefix_states(chunk_map(form, problem.precision), start, 0, problem.precision)
    incoming = jnp.concatenate([start[None], after[:-1]])
    writes = form.writes(incoming, problem.precision)
    o = read(chunks, incoming, writes, problem.precision)
    return from_chunks(o)[:, : problem.q.shape[1]], after[-1]
