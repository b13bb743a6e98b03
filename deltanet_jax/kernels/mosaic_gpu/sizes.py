"""Head sizes of a call in those of the kernels, exactly.

Channels of zeros change nothing, so a size is rounded up to the next one of the kernels. Columns
of V never meet, so wide values are more value heads of the same key head. Without the delta rule
the outputs of parts of K add up, so wide keys are more key heads of the same values.

A padded array is a copy, which XLA joins with what made the array: in a layer it costs little.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deltanet_jax.core.problem import GateKind, Problem, Tokens

__all__ = ["HEAD_DIMS", "Fit", "fit", "narrow", "why_not", "widen"]

HEAD_DIMS = (64, 128, 256)
LARGEST = 256
LARGEST_BESIDE_CHANNELS = 128  # with a vector gate


class Fit(NamedTuple):
    """How heads of `K` and `V` channels become heads of the kernels."""

    key_parts: int
    key_dim: int  # of a part
    value_parts: int
    value_dim: int  # of a part


def why_not(key_dim: int, gate: GateKind, *, delta: bool) -> str | None:
    """Return why no head of the kernels holds keys of this size, or `None`; any V does."""
    limit = _limit(gate)
    if not delta or key_dim <= limit:
        return None
    beside = " and a vector gate" if gate == "vector" else ""
    return (
        f"with the delta rule{beside} the Hopper kernels need K of at most {limit}; got K={key_dim}"
    )


def fit(key_dim: int, value_dim: int, gate: GateKind) -> Fit:
    """Choose the fewest parts, each of the smallest size of the kernels that holds it."""
    return Fit(*_parts(key_dim, _limit(gate)), *_parts(value_dim, _limit(gate)))


def _limit(gate: GateKind) -> int:
    return LARGEST_BESIDE_CHANNELS if gate == "vector" else LARGEST


def _parts(size: int, limit: int) -> tuple[int, int]:
    parts = max(1, -(-size // limit))
    part = -(-size // parts)
    return parts, min(x for x in HEAD_DIMS if x >= part)


def widen(problem: Problem) -> Problem:
    """Return the problem with heads of the kernels' sizes.

    Value heads are ordered by key head, part of K, value head of the group, part of V.
    """
    (_, _, H, K), (HV, V) = problem.q.shape, problem.v.shape[2:]
    made = fit(K, V, problem.gate)
    if made == (1, K, 1, V):
        return problem
    P, N, G = made.key_parts, made.value_parts, HV // H

    def keys(x: jax.Array) -> jax.Array:
        return _pad(x, -1, P * made.key_dim).reshape(*x.shape[:2], H * P, made.key_dim)

    def values(x: jax.Array) -> jax.Array:
        x = _pad(x, -1, N * made.value_dim).reshape(*x.shape[:2], H, 1, G * N, made.value_dim)
        return _repeat(x, 3, P).reshape(*x.shape[:2], -1, made.value_dim)

    def scalars(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:2], H, 1, G, 1)
        return _repeat(_repeat(x, 3, P), 5, N).reshape(*x.shape[:2], -1)

    def channels(x: jax.Array) -> jax.Array:
        x = _pad(x, -1, P * made.key_dim).reshape(*x.shape[:2], H, G, P, made.key_dim)
        x = _repeat(jnp.swapaxes(x, 3, 4)[..., None, :], 5, N)
        return x.reshape(*x.shape[:2], -1, made.key_dim)

    g, beta, state = problem.g, problem.beta, problem.initial_state
    tokens = Tokens(
        q=keys(problem.q),
        k=keys(problem.k),
        v=values(problem.v),
        g=None if g is None else channels(g) if problem.gate == "vector" else scalars(g),
        beta=None if beta is None else scalars(beta),
    )
    state = None if state is None else _wide_state(state, made, H)
    return dataclasses.replace(problem, tokens=tokens, initial_state=state)


def narrow(problem: Problem, o: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return outputs and state of `widen(problem)` as those of `problem`."""
    (_, _, H, K), (HV, V) = problem.q.shape, problem.v.shape[2:]
    made = fit(K, V, problem.gate)
    if made == (1, K, 1, V):
        return o, state
    P, N, G = made.key_parts, made.value_parts, HV // H
    B, T = problem.v.shape[:2]
    o = o.reshape(B, T, H, P, G, N * made.value_dim)
    o = o[:, :, :, 0] if P == 1 else jnp.sum(o, axis=3, dtype=jnp.float32).astype(o.dtype)
    state = state.reshape(B, H, P, G, N, made.key_dim, made.value_dim)
    state = jnp.transpose(state, (0, 1, 3, 2, 5, 4, 6))
    state = state.reshape(B, HV, P * made.key_dim, N * made.value_dim)
    return o.reshape(B, T, HV, -1)[..., :V], state[:, :, :K, :V]


def _wide_state(state: jax.Array, made: Fit, key_heads: int) -> jax.Array:
    """`[B, HV, K, V]` as `[B, HV', K', V']`, heads in the order of `widen`."""
    P, N = made.key_parts, made.value_parts
    state = _pad(_pad(state, -1, N * made.value_dim), -2, P * made.key_dim)
    B, HV = state.shape[:2]
    state = state.reshape(B, key_heads, HV // key_heads, P, made.key_dim, N, made.value_dim)
    state = jnp.transpose(state, (0, 1, 3, 2, 5, 4, 6))
    return state.reshape(B, -1, made.key_dim, made.value_dim)


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Add zeros at the end of an axis."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def _repeat(x: jax.Array, axis: int, times: int) -> jax.Array:
    """Repeat an axis of length 1."""
    if times == 1:
        return x
    return jnp.broadcast_to(x, (*x.shape[:axis], times, *x.shape[axis + 1 :]))
