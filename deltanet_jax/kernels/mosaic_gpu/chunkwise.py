"""The kernels joined by `custom_vjp`, and the way into and out of their layout."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax import compat
from deltanet_jax.core.problem import GateKind, Problem, Tokens, start_state
from deltanet_jax.kernels.mosaic_gpu import (
    channel_gradients,
    chunk_cotangents,
    chunk_gradients,
    chunk_inverses,
    decayed_chunks,
    gate_vectors,
    reverse_states,
    run_states,
    run_states_fused,
    sizes,
    split,
)
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import batched
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.support import LOWEST_GATE, why_not

__all__ = ["chunkwise"]


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
    state = start_state(problem).astype(jnp.float32) if starts or empty else None
    if empty:
        return problem.v, state
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    wide = sizes.widen(dataclasses.replace(problem, initial_state=state))
    beta = None if wide.beta is None else wide.beta.astype(jnp.float32)
    tokens = wide.tokens._replace(g=_gate(wide), beta=beta)
    (B, _, _, K), (HV, V) = wide.q.shape, wide.v.shape[2:]
    pieces = split.pieces_of(B, -(-T // CHUNK), HV, K, V)
    tokens = jax.tree.map(lambda x: _pad(x, pieces * CHUNK), tokens)
    call = Call(problem.scale, pieces, starts, interpret or None)
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


def _shape(x: dict[str, Any]) -> Shape:
    """Return sizes and variant of the inputs of `_inputs`."""
    gate: GateKind = "scalar" if x["b"] is not None else "none"
    if x["g"] is not None:
        gate = "vector"
    return Shape.of(q=x["q"], v=x["v"], gate=gate, delta=x["beta"] is not None)


def _decayed(call: Call, shape: Shape, x: dict[str, Any], *, save: bool) -> dict[str, Any]:
    """Prepare what the recurrent kernels read, from `q`, `k`, `beta` and the gate."""
    q, k, beta, b = (x[name] for name in ("q", "k", "beta", "b"))
    interpret = call.interpret
    if x["g"] is None:
        inverse = None
        alone = call.pieces > 1 or not run_states_fused.covers(shape, save=save)
        if beta is not None and alone:
            inverse = chunk_inverses.chunk_inverses(shape, k, beta, b, interpret=interpret)
        return {"inverse": inverse}
    out = decayed_chunks.decayed_chunks(shape, q, k, x["g"], beta, save=save, interpret=interpret)
    channels = {name: out.pop(name) for name in ("writes", "scores", "kept")}
    return out | {"channels": channels}


def _fold(call: Call, tree: Any) -> Any:
    """Make every piece of the sequence a row of the batch."""
    return jax.tree.map(lambda x: split.fold(x, call.pieces), tree)


def _unfold(call: Call, tree: Any) -> Any:
    return jax.tree.map(lambda x: split.unfold(x, call.pieces), tree)


def _operands(x: dict[str, Any]) -> tuple[Any, ...]:
    """Return the inputs of both recurrent kernels: q, k, the inverse and the gates by name."""
    q, k = x.get("queries", x["q"]), x.get("keys", x["k"])
    gates = {"beta": x["beta"], "b": x["b"], "channels": x.get("channels")}
    return q, k, x.get("inverse"), gates


def _inputs(call: Call, x: Tokens) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Return inputs of both directions, and those of the forward alone."""
    inputs = {"q": x.q, "k": x.k, "v": x.v, "beta": None, "b": None, "g": None}
    if x.g is not None and x.g.ndim == 3:
        launch = batched(functools.partial(gate_vectors.gate_vectors, interpret=call.interpret))
        vectors = launch(x.g, x.beta)
        exponentials = {name: vectors.pop(name) for name in ("decay", "rest")}
        return inputs | vectors, exponentials
    beta = None if x.beta is None else _chunk_vectors(x.beta)
    return inputs | {"beta": beta, "g": x.g}, {}


def _zero_states(call: Call, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return zero states of the sequences whose pieces have these keys and values."""
    rows, _, heads, value_dim = v.shape
    return jnp.zeros((rows // call.pieces, heads, k.shape[-1], value_dim), jnp.float32)


def _forward(
    call: Call, x: Tokens, state: jax.Array | None, *, save: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the forward's results, and the inputs of the kernels as the backward reads them."""
    inputs, exponentials = _inputs(call, x)

    def launch(x, exponentials, state):
        x, exponentials = _fold(call, (x, exponentials))
        shape = _shape(x)
        made = _decayed(call, shape, x, save=save)
        q, k, inverse, gates = _operands(x | made)
        v = x["v"]
        gates |= {"exponentials": exponentials, "interpret": call.interpret}
        maps = None
        if call.pieces > 1:
            maps, offsets = run_states.state_maps(shape, k, v, inverse, **gates)
            if state is None:
                state = _zero_states(call, k, v)
            maps = split.terms_of(maps)
            state = split.chain(
                state, maps, offsets, call.pieces, reverse=False, interpret=call.interpret
            )
        out = run_states.run_states(
            shape, q, k, v, inverse, state, scale=call.scale, save=save, **gates
        )
        final = out.pop("final")
        final = final.reshape(-1, call.pieces, *final.shape[1:])[:, -1]
        # The maps are per piece, not per token; on one axis with the batch for `vmap`.
        maps = jax.tree.map(lambda x: x.reshape(-1, call.pieces, *x.shape[1:]), maps)
        return _unfold(call, made | out) | {"final": final, "maps": maps}

    return batched(launch)(inputs, exponentials, state), inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: Call, tokens: Tokens, state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Run the kernels on a multiple of 64 tokens; gates, `beta` and state are float32."""
    out, _ = _forward(call, tokens, state, save=False)
    return out["o"], out["final"]


def _run_forward(call: Call, tokens: Any, state: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    tokens, state = custom_vjp_primal_tree_values((tokens, state))
    out, inputs = _forward(call, tokens, state, save=True)
    o, final = out.pop("o"), out.pop("final")
    return (o, final), inputs | out


def _run_backward(call: Call, saved: dict[str, Any], cotangents: Any) -> tuple[Tokens, Any]:
    do, dfinal = cotangents
    if isinstance(do, SymbolicZero):
        do = compat.vary_like(jnp.zeros(do.shape, do.dtype), saved["v"])
    # Where the final state is not used, as in most training, there are no zeros to load.
    dstate = None
    if not isinstance(dfinal, SymbolicZero):
        dstate = dfinal.astype(jnp.float32) / call.scale
    launch = batched(functools.partial(_backward, call))
    d = launch(saved, do, dstate)
    gradients = Tokens(
        q=_per_key_head(d["q"], saved["q"]),
        k=_per_key_head(d["k"], saved["k"]),
        v=d["v"],
        g=d["g"],
        beta=None if d["beta"] is None else _token_vectors(d["beta"]),
    )
    return gradients, None if d["state"] is None else d["state"] * call.scale


def _backward(
    call: Call, x: dict[str, Any], do: jax.Array, dstate: jax.Array | None
) -> dict[str, jax.Array | None]:
    """The gradients of the inputs of `_forward`, that of the state over scale."""
    maps = x["maps"]
    x, do = _fold(call, (x | {"maps": None}, do))
    q, k, inverse, gates = _operands(x)
    shape = _shape(x)
    reverse = functools.partial(
        reverse_states.reverse_states, shape, q, k, do, inverse,
        scale=call.scale, interpret=call.interpret, **gates,
    )  # fmt: skip
    if call.pieces > 1:
        offsets = reverse(None, only_state=True)["dstate"]
        dstate = _zero_states(call, k, do) if dstate is None else dstate
        maps = tuple(x.reshape(-1, *x.shape[2:]) for x in maps)
        dstate = split.chain(
            dstate, maps, offsets, call.pieces, reverse=True, interpret=call.interpret
        )
    cotangents = reverse(dstate, start=call.starts)
    dstate = cotangents.pop("dstate", None)
    if dstate is not None:
        dstate = dstate.reshape(-1, call.pieces, *dstate.shape[1:])[:, 0]
    dv = cotangents.pop("dv")
    values = (x.get("u", x["v"]), do, dv, x["states"], cotangents)
    gradients = _channel_gradients if x["g"] is not None else _head_gradients
    return _unfold(call, gradients(call, shape, x, values) | {"v": dv}) | {"state": dstate}


def _head_gradients(
    call: Call, shape: Shape, x: dict[str, Any], values: tuple
) -> dict[str, jax.Array | None]:
    dq, dk, dbeta, dg = chunk_gradients.chunk_gradients(
        shape, x["q"], x["k"], *values, beta=x["beta"], b=x["b"],
        scale=call.scale, interpret=call.interpret,
    )  # fmt: skip
    return {"q": dq, "k": dk, "beta": dbeta, "g": dg}


def _channel_gradients(
    call: Call, shape: Shape, x: dict[str, Any], values: tuple
) -> dict[str, jax.Array | None]:
    beta = x["beta"]
    made = x["channels"] | {"overlaps": x.get("overlaps")}
    d = chunk_cotangents.chunk_cotangents(
        shape, made, beta, *values, scale=call.scale, interpret=call.interpret
    )
    dq, dk, dg = channel_gradients.chunk_gradients(
        shape, x["q"], x["k"], x["g"], d, interpret=call.interpret
    )
    return {"q": dq, "k": dk, "beta": d.get("beta"), "g": dg}


def _per_key_head(x: jax.Array, like: jax.Array) -> jax.Array:
    """`[B, T, HV, K]` summed over the value heads that read one key head."""
    if x.shape == like.shape:
        return x
    B, T, H, K = like.shape
    return jnp.sum(x.reshape(B, T, H, -1, K), axis=3, dtype=jnp.float32).astype(like.dtype)


_run.defvjp(_run_forward, _run_backward, symbolic_zeros=True)
