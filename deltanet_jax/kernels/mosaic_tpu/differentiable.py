"""The kernels joined by `custom_vjp`, and the way into and out of their layout."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from deltanet_jax.compat import vary_like, varying_axes, with_default_promotion
from deltanet_jax.core.problem import Problem, decay_with_resets
from deltanet_jax.kernels.mosaic_tpu.backward import backward
from deltanet_jax.kernels.mosaic_tpu.blocks import Inputs, Saved, join, split
from deltanet_jax.kernels.mosaic_tpu.forward import forward
from deltanet_jax.kernels.mosaic_tpu.plan import Plan, make_plan, why_not

__all__ = ["chunkwise"]

# Coarse shares of g are multiples of this: 256 gates that are resets still have an exact sum.
COARSE = 1 / 16


class Heads(NamedTuple):
    """The differentiable arrays, heads before time, `T` a multiple of the chunk size."""

    q: jax.Array  # [BH, T, K]
    k: jax.Array  # [BH, T, K]
    v: jax.Array  # [BHV, T, V]
    g: jax.Array | None  # [BHV, T] or [BHV, T, K], finite
    beta: jax.Array | None  # [BHV, T]
    state: jax.Array  # [BHV, K, V]


def chunkwise(
    problem: Problem, chunk_size: int | None = None, *, interpret: object = False
) -> tuple[jax.Array, jax.Array]:
    """Run the kernels on a problem that `why_not` accepts.

    Args:
        problem: One call in canonical form.
        chunk_size: Tokens per chunk; chosen from the shape by default.
        interpret: True for Pallas's interpreter, or the parameters of its TPU interpreter.

    Returns:
        Outputs `[B, T, HV, V]` in the dtype of `v`, and the final state in float32.

    Raises:
        NotImplementedError: If the kernels do not cover the problem.
    """
    reason = why_not(problem, chunk_size)
    if reason is not None:
        raise NotImplementedError(reason)
    if interpret is True and any(map(varying_axes, (problem.q, problem.k, problem.v))):
        # Pallas's plain interpreter mixes constants with values typed by `shard_map`.
        interpret = pltpu.InterpretParams()
    plan = make_plan(problem, chunk_size, interpret)
    o, final = _run(plan, _heads_first(problem, plan))
    B, T, HV, V = problem.v.shape
    o = jnp.swapaxes(o.reshape(B, HV, -1, V), 1, 2)
    return o[:, :T], final.reshape(B, HV, *final.shape[1:])


def _heads_first(problem: Problem, plan: Plan) -> Heads:
    B, T, HV, V = problem.v.shape
    f32 = jnp.float32
    state = problem.initial_state
    if state is None:
        state = jnp.zeros((B, HV, problem.k.shape[-1], V), f32)
    g = decay_with_resets(problem)
    beta = None if problem.beta is None else problem.beta.astype(f32)
    padding = -T % plan.chunk

    def turn(x: jax.Array) -> jax.Array:
        # Padding follows the gate and is a no-op: k = v = beta = g = 0.
        x = jnp.swapaxes(x, 1, 2)
        x = x.reshape(-1, *x.shape[2:])
        return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))

    heads = Heads(
        q=turn(problem.q),
        k=turn(problem.k),
        v=turn(problem.v),
        g=_optional(turn, g),
        beta=_optional(turn, beta),
        state=state.astype(f32).reshape(B * HV, *state.shape[2:]),
    )
    everything = jax.tree.leaves(heads)
    varied: Heads = jax.tree.map(lambda x: vary_like(x, *everything), heads)
    return varied


def _optional(function: Callable[[jax.Array], jax.Array], x: jax.Array | None) -> jax.Array | None:
    return None if x is None else function(x)


def _inputs(x: Heads, plan: Plan) -> Inputs[jax.Array]:
    G, keys, C = plan.heads, plan.key_heads, plan.chunk
    beta = _optional(lambda y: split(y, G, C), x.beta)
    gate: tuple[jax.Array, ...] = ()
    if x.g is not None:
        g = split(x.g, G, C)
        gate = (g,)
        if plan.gate != "vector":
            share = jnp.round(g / COARSE) * COARSE
            gate = jnp.cumsum(share, axis=3), jnp.cumsum(g - share, axis=3)
    return Inputs(split(x.q, keys, C), split(x.k, keys, C), split(x.v, G, C), beta, gate)


Residuals = tuple[Inputs[jax.Array], Saved[jax.Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@with_default_promotion
def _run(plan: Plan, x: Heads) -> tuple[jax.Array, jax.Array]:
    o, final, _ = forward(_inputs(x, plan), x.state, plan, save=False)
    return join(o), final


@with_default_promotion
def _run_forward(plan: Plan, x: Heads) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    inputs = _inputs(x, plan)
    o, final, saved = forward(inputs, x.state, plan, save=True)
    assert saved is not None
    return (join(o), final), (inputs, saved)


@with_default_promotion
def _run_backward(
    plan: Plan, residuals: Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Heads]:
    inputs, saved = residuals
    do, d_final = cotangents
    grads = backward(inputs, saved, split(do, plan.heads, plan.chunk), d_final, plan)
    beta = _optional(join, grads.beta)
    g = grads.gate
    if g is not None and plan.gate == "scalar":
        g = jax.lax.cumsum(g, axis=3, reverse=True)

    def per_key_head(x: jax.Array) -> jax.Array:
        if x.shape != inputs.q.shape:
            x = jnp.sum(x.reshape(inputs.q.shape[0], -1, *x.shape[1:]), axis=1)
        return join(x).astype(inputs.q.dtype)

    q, k = per_key_head(grads.q), per_key_head(grads.k)
    return (Heads(q, k, join(grads.v), _optional(join, g), beta, grads.state),)


_run.defvjp(_run_forward, _run_backward)
