"""Sequences of different lengths one after another in one row, each with its own states.

The row is cut into pieces of one static length so that no piece holds two sequences. Every
piece is reduced to its affine map; along each sequence the maps give the state that enters
each piece; then all pieces run as one batch from those states, in whatever implementation.
With `N` sequences, `T` tokens and pieces of `L` that is `T/L + N` pieces at most, whatever the
lengths, so one compiled program serves them all.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from deltanet_jax import compat
from deltanet_jax.core.affine import AffineMap, apply
from deltanet_jax.core.numerics import accumulation_dtype
from deltanet_jax.core.problem import Problem
from deltanet_jax.ops.dispatch import Algorithm
from deltanet_jax.ops.maps import EXACT, sequence_map

__all__ = ["run_ragged"]

SHORTEST_PIECE, LONGEST_PIECE = 16, 512  # tokens


class Pieces(NamedTuple):
    """Where the tokens of a ragged row go. Unused places have an index that is out of range."""

    sequence: Int[Array, " M"]  # that a piece belongs to
    first: Bool[Array, " M"]  # whether it is the first of its sequence
    last: Int[Array, " N"]  # the last piece of each sequence
    tokens: Int[Array, "M L"]  # the token in each place of each piece
    places: Int[Array, " T"]  # the place of each token in all pieces

    def gather(self, x: Float[Array, "1 T *rest"]) -> Float[Array, "M L *rest"]:
        """A row as pieces; places without a token are zero, which is a no-op."""
        return x[0].at[self.tokens].get(mode="fill", fill_value=0)

    def scatter(self, x: Float[Array, "M L *rest"]) -> Float[Array, "1 T *rest"]:
        """Pieces as a row; tokens of no sequence are zero."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat.at[self.places].get(mode="fill", fill_value=0)[None]


def piece_length(T: int, N: int) -> int:
    """The power of two above the mean length: at most about half of all places are padding."""
    mean = -(-T // N)
    return min(LONGEST_PIECE, max(SHORTEST_PIECE, 1 << (mean - 1).bit_length()))


def cut(cu_seqlens: Int[Array, " N+1"], T: int) -> Pieces:
    """Cut `T` tokens into pieces, none of which holds two sequences."""
    N = cu_seqlens.shape[0] - 1
    L = piece_length(T, N)
    M = T // L + N
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    after = jnp.cumsum((end - begin + L - 1) // L)  # the piece after each sequence's last
    before = jnp.pad(after, (1, 0))[:-1]

    piece = jnp.arange(M)
    sequence = jnp.searchsorted(after, piece, side="right")
    start = begin.at[sequence].get(mode="fill", fill_value=0)
    stop = end.at[sequence].get(mode="fill", fill_value=0)
    number = piece - before.at[sequence].get(mode="fill", fill_value=0)
    tokens = (start + number * L)[:, None] + jnp.arange(L)[None]

    token = jnp.arange(T)
    owner = jnp.searchsorted(end, token, side="right")
    first_place = (before * L - begin).at[owner].get(mode="fill", fill_value=M * L)
    return Pieces(
        sequence=sequence,
        first=number == 0,
        last=after - 1,
        tokens=jnp.where(tokens < stop[:, None], tokens, T),
        places=first_place + token,
    )


@partial(jax.jit, static_argnames=("algorithm", "chunk_size"))
def run_ragged(
    problem: Problem,
    cu_seqlens: Int[Array, " N+1"],
    *,
    algorithm: Algorithm,
    chunk_size: int | None,
) -> tuple[Float[Array, "1 T HV V"], Float[Array, "N HV K V"]]:
    """Run a problem of one row whose `initial_state` is `[N, HV, K, V]`, one per sequence."""
    T, N = problem.q.shape[1], cu_seqlens.shape[0] - 1
    states = _initial_states(problem, N)
    if T == 0:
        return problem.v, states
    pieces = cut(cu_seqlens, T)
    batch = replace(problem.map_tokens(pieces.gather), initial_state=None)
    incoming = _incoming_states(sequence_map(batch), states, pieces)
    o, after = algorithm(replace(batch, initial_state=incoming), chunk_size)
    empty = (cu_seqlens[1:] == cu_seqlens[:-1])[:, None, None, None]
    return pieces.scatter(o), jnp.where(empty, states, after[pieces.last])


def _initial_states(problem: Problem, N: int) -> Float[Array, "N HV K V"]:
    if problem.initial_state is not None:
        return problem.initial_state
    (HV, V), K = problem.v.shape[2:], problem.k.shape[-1]
    return jnp.zeros((N, HV, K, V), accumulation_dtype(problem.q, problem.k, problem.v))


def _incoming_states(
    maps: AffineMap, states: Float[Array, "N HV K V"], pieces: Pieces
) -> Float[Array, "M HV K V"]:
    """The state that enters each piece: its sequence's own, or what the piece before leaves."""
    own = states.at[pieces.sequence].get(mode="fill", fill_value=0)

    def body(
        state: jax.Array, piece: tuple[AffineMap, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        map_, own, first = piece
        state = jnp.where(first, own, state)
        return apply(map_, state, EXACT), state

    start = compat.vary_like(jnp.zeros_like(own[0]), own, *maps, pieces.first)
    return jax.lax.scan(body, start, (maps, own, pieces.first))[1]
