"""Form 1 of the delta rule: one chunk, solved with the state that comes in, and its derivative.

Rows of the chunk, `S` its incoming state, `L` its system and `A` its scores::

    E  = v - (k*exp(b)) S
    U  = (I + L)^-1 (beta * E)
    O  = (q*exp(b)) S + A U
    S' = Diag(exp(b_C)) S + (k*exp(b_C - b))^T U

The derivative is written out. As the transpose of its products JAX makes some of two transposed
factors, which XLA's CPU backend runs at half the speed (`docs/notebook.md`).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.core.chunk import scale, system_of
from deltanet_jax.core.decay import decay_from_start, decay_to_end, scores, total_decay
from deltanet_jax.core.linear import linear_map
from deltanet_jax.core.numerics import dot
from deltanet_jax.core.problem import Tokens
from deltanet_jax.core.triangular import diagonal_inverses, substitute, substitute_transposed

__all__ = ["solve_chunk"]

# Rows of a diagonal block, half of form 2's: chunks come one after another, so arithmetic counts.
BLOCK = 16

Precision = jax.lax.Precision | None
State = Float[Array, "*B K V"]
Result = tuple[State, Float[Array, "*B C V"]]


class Inputs(NamedTuple):
    """Inputs of the outputs and of the next state."""

    state: State
    queries: Float[Array, "*B C K"]  # q*exp(b)
    readers: Float[Array, "*B C K"]  # k*exp(b)
    writers: Float[Array, "*B C K"]  # k*exp(b_C - b)
    v: Float[Array, "*B C V"]
    beta: Float[Array, "*B C 1"]
    scores: Float[Array, "*B C C"]
    system: Float[Array, "*B C C"]  # strictly lower triangular
    total: Float[Array, "*B D 1"] | None  # exp(b_C)


class Solved(NamedTuple):
    """The inputs, and what was computed on the way."""

    inputs: Inputs
    inverses: tuple[Float[Array, "*B _ _"], ...]  # of the diagonal blocks
    error: Float[Array, "*B C V"]
    writes: Float[Array, "*B C V"]


def solve_chunk(chunk: Tokens, state: State, precision: Precision) -> Result:
    """The state after a chunk, and its outputs."""
    assert chunk.beta is not None
    q, k, v = (x.astype(state.dtype) for x in (chunk.q, chunk.k, chunk.v))
    decay = decay_from_start(chunk.g)
    inputs = Inputs(
        state=state,
        queries=scale(q, decay),
        readers=scale(k, decay),
        writers=scale(k, decay_to_end(chunk.g)),
        v=v,
        beta=chunk.beta,
        scores=scores(chunk.q, chunk.k, chunk.g, strict=False, precision=precision),
        system=system_of(chunk, chunk.beta, precision),
        total=total_decay(chunk.g),
    )
    return _pass(inputs, precision)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _pass(inputs: Inputs, precision: Precision) -> Result:
    return _results(_solve(inputs, precision), precision)


def _solve(inputs: Inputs, precision: Precision) -> Solved:
    error = inputs.v - dot("...ck,...kv->...cv", inputs.readers, inputs.state, precision)
    inverses = diagonal_inverses(inputs.system, BLOCK)
    writes = substitute(inputs.system, inverses, inputs.beta * error)
    return Solved(inputs, inverses, error, writes)


def _results(solved: Solved, precision: Precision) -> Result:
    x, writes = solved.inputs, solved.writes
    past = dot("...ck,...kv->...cv", x.queries, x.state, precision)
    new = dot("...ck,...cv->...kv", x.writers, writes, precision)
    o = past + dot("...ij,...jv->...iv", x.scores, writes, precision)
    return scale(x.state, x.total) + new, o


@_pass.defjvp
def _pass_jvp(
    precision: Precision, primals: tuple[Inputs], tangents: tuple[Inputs]
) -> tuple[Result, Result]:
    solved = _solve(*primals, precision)
    forward, reverse = partial(_tangents, precision), partial(_cotangents, precision)
    change = linear_map(forward, reverse, solved, *tangents)
    return _results(solved, precision), change


def _tangents(precision: Precision, solved: Solved, d: Inputs) -> Result:
    x, inverses, error, writes = solved
    read = dot("...ck,...kv->...cv", d.readers, x.state, precision)
    d_error = d.v - read - dot("...ck,...kv->...cv", x.readers, d.state, precision)
    known = dot("...ij,...jv->...iv", d.system, writes, precision)
    d_writes = substitute(x.system, inverses, d.beta * error + x.beta * d_error - known)
    o = dot("...ck,...kv->...cv", d.queries, x.state, precision)
    o += dot("...ck,...kv->...cv", x.queries, d.state, precision)
    o += dot("...ij,...jv->...iv", d.scores, writes, precision)
    o += dot("...ij,...jv->...iv", x.scores, d_writes, precision)
    state = scale(d.state, x.total)
    if d.total is not None:
        state += x.state * d.total
    state += dot("...ck,...cv->...kv", d.writers, writes, precision)
    return state + dot("...ck,...cv->...kv", x.writers, d_writes, precision), o


def _cotangents(precision: Precision, solved: Solved, results: Result) -> Inputs:
    """Apply the transpose of `_tangents`; `d_x` are gradients here."""
    x, inverses, error, writes = solved
    d_next, d_o = results
    d_writes = dot("...ck,...kv->...cv", x.writers, d_next, precision)
    d_writes += dot("...ij,...iv->...jv", x.scores, d_o, precision)
    d_solved = substitute_transposed(x.system, inverses, d_writes)
    d_error = x.beta * d_solved
    d_state = scale(d_next, x.total)
    d_state += dot("...ck,...cv->...kv", x.queries, d_o, precision)
    d_state -= dot("...ck,...cv->...kv", x.readers, d_error, precision)
    d_total = None
    if x.total is not None:
        d_total = jnp.sum(x.state * d_next, axis=-1, keepdims=True)
        if x.total.shape[-2] == 1:
            d_total = jnp.sum(d_total, axis=-2, keepdims=True)
    # A sum over V by a product with ones, several times faster on a CPU than a reduction.
    ones = jnp.ones((error.shape[-1], 1), error.dtype)
    return Inputs(
        state=d_state,
        queries=dot("...cv,...kv->...ck", d_o, x.state, precision),
        readers=-dot("...cv,...kv->...ck", d_error, x.state, precision),
        writers=dot("...cv,...kv->...ck", writes, d_next, precision),
        v=d_error,
        beta=dot("...cv,vo->...co", d_solved * error, ones, jax.lax.Precision.HIGHEST),
        scores=dot("...iv,...jv->...ij", d_o, writes, precision),
        system=-dot("...iv,...jv->...ij", d_solved, writes, precision),
        total=d_total,
    )
