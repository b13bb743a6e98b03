"""The kernels joined by `custom_vjp`, and the way into and out of their layout."""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from deltanet_jax import compat
from deltanet_jax.core.problem import GateKind, Problem, Tokens, start_state
from deltanet_jax.kernels.mosaic_gpu import (
    channel_gradients,
    chunk_cotangents,
    chunk_gradients,
    chunk_inverses,
    decayed_chunks,
    gate_vectors,
    program,
    reverse_states,
    run_states,
    run_states_fused,
    sizes,
    split,
)
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import batched, interpreter
from deltanet_jax.kernels.mosaic_gpu.decayed_chunks import DecayedChunks
from deltanet_jax.kernels.mosaic_gpu.run_states import States
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.support import LOWEST_GATE, why_not

__all__ = ["chunkwise"]

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of one call."""

    scale: float
    pieces: int  # of the sequence, run in parallel
    starts: bool  # from an initial state
    interpret: object  # None, or the interpreter's parameters


# The kernels keep state gradients over the scale, which must not overflow a bfloat16 value then.
SMALLEST_SCALE = 2.0**-64


def chunkwise(
    problem: Problem, chunk_size: int | None = None, *, interpret: object = False
) -> tuple[jax.Array, jax.Array]:
    """Run the kernels on a problem that `why_not` accepts.

    Args:
        problem: One call in canonical form.
        chunk_size: 64 or `None`.
        interpret: True for Pallas's GPU interpreter, or its parameters.

    Returns:
        Outputs `[B, T, HV, V]` in the dtype of `v`, and the final state in float32.

    Raises:
        NotImplementedError: If the kernels do not cover the problem.
    """
    reason = why_not(problem, chunk_size)
    if reason is not None:
        raise NotImplementedError(reason)
    if abs(problem.scale) < SMALLEST_SCALE:
        unscaled = dataclasses.replace(problem, scale=1.0)
        o, final = chunkwise(unscaled, chunk_size, interpret=interpret)
        return (problem.scale * o.astype(jnp.float32)).astype(o.dtype), final
    T, starts = problem.q.shape[1], problem.initial_state is not None
    empty = T == 0 or problem.v.size == 0
    if empty:
        return problem.v, start_state(problem).astype(jnp.float32)
    state = start_state(problem).astype(jnp.float32) if starts else None
    wide = sizes.widen(dataclasses.replace(problem, initial_state=state))
    beta = None if wide.beta is None else wide.beta.astype(jnp.float32)
    tokens = wide.tokens._replace(g=_gate(wide), beta=beta)
    (B, _, _, K), (HV, V) = wide.q.shape, wide.v.shape[2:]
    pieces = split.pieces_of(B, -(-T // CHUNK), HV, K, V)
    tokens = jax.tree.map(lambda x: _pad(x, pieces * CHUNK), tokens)
    call = Call(problem.scale, pieces, starts, interpreter(interpret))
    o, final = _run(call, tokens, wide.initial_state)
    return sizes.narrow(problem, o[:, :T], final)


def _gate(problem: Problem) -> jax.Array | None:
    """The log-decay with resets written into it, as `LOWEST_GATE` where gates are summed.

    A vector gate is never summed: its exponentials are multiplied, and -inf stays.
    """
    g = problem.g
    if g is not None:
        g = g.astype(jnp.float32)
        if g.ndim == 3:
            g = _bounded(g)
    if problem.reset is None:
        return g
    if g is None:
        g = jnp.zeros(problem.v.shape[:3], jnp.float32)
    reset = problem.reset.reshape(*problem.reset.shape, *(1,) * (g.ndim - 2))
    return jnp.where(reset, LOWEST_GATE, g)


@jax.custom_jvp
def _bounded(g: jax.Array) -> jax.Array:
    """`g`, differentiated as the maximum with `LOWEST_GATE` that `gate_vectors` takes.

    Taken here, it would be a kernel of its own.
    """
    return g


@_bounded.defjvp
def _bounded_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (g,), (dg,) = primals, tangents
    return g, jnp.where(g > LOWEST_GATE, dg, 0.0)


def _pad(x: jax.Array, multiple: int) -> jax.Array:
    """Add no-op tokens at the end: k = v = beta = g = 0."""
    if x.shape[1] % multiple == 0:
        return x
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2))


def _chunk_vectors(x: jax.Array) -> jax.Array:
    """`[B, T, HV]` as `[B, N, HV, C]`."""
    B, _, HV = x.shape
    return jnp.swapaxes(x.reshape(B, -1, CHUNK, HV), 2, 3)


def _token_vectors(x: jax.Array) -> jax.Array:
    """`[B, N, HV, C]` as `[B, T, HV]`."""
    B, _, HV, _ = x.shape
    return jnp.swapaxes(x, 2, 3).reshape(B, -1, HV)


class Inputs(NamedTuple):
    """Tokens as the kernels read them; `None` where a call has none."""

    q: jax.Array  # [B, T, H, K]
    k: jax.Array
    v: jax.Array  # [B, T, HV, V]
    beta: jax.Array | None  # [B, N, HV, C]
    b: jax.Array | None  # in-chunk cumulative log-decay of a scalar gate, [B, N, HV, C]
    g: jax.Array | None  # a vector gate, [B, T, HV, K]

    @property
    def shape(self) -> Shape:
        """Sizes and variant of the call."""
        gate: GateKind = "none" if self.b is None else "scalar"
        if self.g is not None:
            gate = "vector"
        return Shape.of(q=self.q, v=self.v, gate=gate, delta=self.beta is not None)


class Exponentials(NamedTuple):
    """Exponentials of a scalar gate, which only the forward reads, `[B, N, HV, C]`."""

    decay: jax.Array | None = None
    rest: jax.Array | None = None


class Residuals(NamedTuple):
    """Arrays of the forward that the backward reads."""

    inputs: Inputs
    decayed: DecayedChunks
    states: jax.Array | None
    u: jax.Array | None  # corrected values, with the delta rule
    maps: tuple[jax.Array, ...] | None  # of the pieces of a split sequence


def _decayed(call: Call, shape: Shape, x: Inputs, *, save: bool) -> DecayedChunks:
    """Prepare what the recurrent kernels read, from `q`, `k`, `beta` and the gate."""
    interpret = call.interpret
    if x.g is not None:
        return decayed_chunks.decayed_chunks(
            shape, x.q, x.k, x.g, x.beta, save=save, interpret=interpret
        )
    alone = call.pieces > 1 or not run_states_fused.covers(shape, save=save)
    if x.beta is None or not alone:
        return DecayedChunks()
    inverse = chunk_inverses.chunk_inverses(shape, x.k, x.beta, x.b, interpret=interpret)
    return DecayedChunks(inverse=inverse)


def _fold(call: Call, tree: Tree) -> Tree:
    """Make every piece of the sequence a row of the batch."""
    folded: Tree = jax.tree.map(lambda x: split.fold(x, call.pieces), tree)
    return folded


def _unfold(call: Call, tree: Tree) -> Tree:
    whole: Tree = jax.tree.map(lambda x: split.unfold(x, call.pieces), tree)
    return whole


def _operands(x: Inputs, made: DecayedChunks, exponentials: Exponentials) -> program.Inputs:
    """Return the inputs of both recurrent kernels but for values and states."""
    return program.Inputs(
        q=x.q if made.queries is None else made.queries,
        k=x.k if made.keys is None else made.keys,
        inverse=made.inverse,
        beta=x.beta,
        b=x.b,
        decay=exponentials.decay,
        rest=exponentials.rest,
        writes=made.writes,
        scores=made.scores,
        kept=made.kept,
    )


def _inputs(call: Call, x: Tokens) -> tuple[Inputs, Exponentials]:
    """Return inputs of both directions, and those of the forward alone."""
    if x.g is not None and x.g.ndim == 3:
        launch = batched(functools.partial(gate_vectors.gate_vectors, interpret=call.interpret))
        vectors = launch(x.g, x.beta)
        inputs = Inputs(x.q, x.k, x.v, vectors.beta, vectors.b, None)
        return inputs, Exponentials(vectors.decay, vectors.rest)
    beta = None if x.beta is None else _chunk_vectors(x.beta)
    return Inputs(x.q, x.k, x.v, beta, None, x.g), Exponentials()


def _zero_states(call: Call, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return zero states of the sequences whose pieces have these keys and values."""
    rows, _, heads, value_dim = v.shape
    return jnp.zeros((rows // call.pieces, heads, k.shape[-1], value_dim), jnp.float32)


def _forward(
    call: Call, tokens: Tokens, state: jax.Array | None, *, save: bool
) -> tuple[jax.Array, jax.Array, Residuals]:
    """Return the outputs, the final state, and what the backward reads."""
    inputs, exponentials = _inputs(call, tokens)
    launch = batched(functools.partial(_launch_forward, call, save))
    out, decayed, maps = launch(inputs, exponentials, state)
    return out.o, out.final, Residuals(inputs, decayed, out.states, out.u, maps)


def _launch_forward(
    call: Call, save: bool, x: Inputs, exponentials: Exponentials, state: jax.Array | None
) -> tuple[States, DecayedChunks, tuple[jax.Array, ...] | None]:
    x, exponentials = _fold(call, (x, exponentials))
    shape = x.shape
    made = _decayed(call, shape, x, save=save)
    operands = _operands(x, made, exponentials)
    maps = None
    if call.pieces > 1:
        whole, offsets = run_states.state_maps(shape, operands, x.v, interpret=call.interpret)
        if state is None:
            state = _zero_states(call, operands.k, x.v)
        maps = split.terms_of(whole)
        state = split.chain(
            state, maps, offsets, call.pieces, reverse=False, interpret=call.interpret
        )
    out = run_states.run_states(
        shape, operands, x.v, state, scale=call.scale, save=save, interpret=call.interpret
    )
    final = out.final.reshape(-1, call.pieces, *out.final.shape[1:])[:, -1]
    # The maps are per piece, not per token; on one axis with the batch for `vmap`.
    maps = jax.tree.map(lambda x: x.reshape(-1, call.pieces, *x.shape[1:]), maps)
    out, made = _unfold(call, (out._replace(final=None), made))
    return out._replace(final=final), made, maps


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@compat.with_default_promotion
def _run(call: Call, tokens: Tokens, state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Run the kernels on a multiple of 64 tokens; gates, `beta` and state are float32."""
    o, final, _ = _forward(call, tokens, state, save=False)
    return o, final


@compat.with_default_promotion
def _run_forward(
    call: Call, tokens: Any, state: Any
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    tokens, state = custom_vjp_primal_tree_values((tokens, state))
    o, final, residuals = _forward(call, tokens, state, save=True)
    return (o, final), residuals


@compat.with_default_promotion
def _run_backward(call: Call, saved: Residuals, cotangents: Any) -> tuple[Tokens, Any]:
    do, dfinal = cotangents
    x = saved.inputs
    if isinstance(do, SymbolicZero):
        do = compat.vary_like(jnp.zeros(do.shape, do.dtype), x.v)
    # Where the final state is not used, as in most training, there are no zeros to load.
    dstate = None
    if not isinstance(dfinal, SymbolicZero):
        dstate = dfinal.astype(jnp.float32) / call.scale
    launch = batched(functools.partial(_backward, call))
    d, dstate = launch(saved, do, dstate)
    gradients = Tokens(
        q=_per_key_head(d.q, x.q),
        k=_per_key_head(d.k, x.k),
        v=d.v,
        g=d.g,
        beta=None if d.beta is None else _token_vectors(d.beta),
    )
    return gradients, None if dstate is None else dstate * call.scale


def _backward(
    call: Call, saved: Residuals, do: jax.Array, dstate: jax.Array | None
) -> tuple[Tokens, jax.Array | None]:
    """Return gradients of the tokens for every value head, and that of the state over scale."""
    maps = saved.maps
    saved, do = _fold(call, (saved._replace(maps=None), do))
    x = saved.inputs
    shape, operands = x.shape, _operands(x, saved.decayed, Exponentials())
    reverse = functools.partial(
        reverse_states.reverse_states, shape, operands, do,
        scale=call.scale, interpret=call.interpret,
    )  # fmt: skip
    if maps is not None:
        offsets = reverse(None, only_state=True).dstate
        dstate = _zero_states(call, operands.k, do) if dstate is None else dstate
        maps = tuple(x.reshape(-1, *x.shape[2:]) for x in maps)
        dstate = split.chain(
            dstate, maps, offsets, call.pieces, reverse=True, interpret=call.interpret
        )
    d = reverse(dstate, start=call.starts)
    dstate = d.dstate
    if dstate is not None:
        dstate = dstate.reshape(-1, call.pieces, *dstate.shape[1:])[:, 0]
    values = (x.v if saved.u is None else saved.u, do, d.dv, saved.states, d.planes)
    gradients = _channel_gradients if shape.vector_gate else _head_gradients
    return _unfold(call, gradients(call, shape, saved, values)), dstate


def _head_gradients(call: Call, shape: Shape, saved: Residuals, values: tuple[Any, ...]) -> Tokens:
    x = saved.inputs
    d = chunk_gradients.chunk_gradients(
        shape, x.q, x.k, *values, beta=x.beta, b=x.b, scale=call.scale, interpret=call.interpret
    )
    return Tokens(q=d.dq, k=d.dk, v=values[2], g=d.dg, beta=d.dbeta)


def _channel_gradients(
    call: Call, shape: Shape, saved: Residuals, values: tuple[Any, ...]
) -> Tokens:
    x = saved.inputs
    assert x.g is not None
    of_operands = chunk_cotangents.chunk_cotangents(
        shape, saved.decayed, x.beta, *values, scale=call.scale, interpret=call.interpret
    )
    d = channel_gradients.channel_gradients(
        shape, x.q, x.k, x.g, of_operands.decayed, interpret=call.interpret
    )
    return Tokens(q=d.dq, k=d.dk, v=values[2], g=d.dg, beta=of_operands.beta)


def _per_key_head(x: jax.Array, like: jax.Array) -> jax.Array:
    """`[B, T, HV, K]` summed over the value heads that read one key head."""
    if x.shape == like.shape:
        return x
    B, T, H, K = like.shape
    return jnp.sum(x.reshape(B, T, H, -1, K), axis=3, dtype=jnp.float32).astype(like.dtype)


_run.defvjp(_run_forward, _run_backward, symbolic_zeros=True)
