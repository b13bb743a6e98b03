"""The backward kernel: chunks in reverse, the gradient of the state stays in VMEM.

With `R = beta E`, `U = T R`, `A = tril(P(q, k))`, `M = stril(P(k, k))`, `L = beta M`::

    dU = scale A^T do + (k * exp(b_C - b)) dS'    dR = T^T dU          dE = dv = beta dR
    dA = scale tril(do U^T)                       dL = -stril(dR U^T)  dM = beta dL
    dq = scale exp(b) * (do S^T) + what dA gives
    dk = exp(b_C - b) * (U dS'^T) - exp(b) * (dE S^T) + what dA and dM give
    dS = exp(b_C) dS' + (q * exp(b))^T (scale do) - (k * exp(b))^T dE
    dbeta = rowsum(dR * E) + rowsum(dL * M)

and every exponential passes its own product on to the gates that it holds.
"""

import functools
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deltanet_jax.compat import type_like
from deltanet_jax.kernels.mosaic_tpu import tile
from deltanet_jax.kernels.mosaic_tpu.blocks import A, Inputs, Saved, Specs
from deltanet_jax.kernels.mosaic_tpu.decay import Carried, Decay, Scores, read_decay
from deltanet_jax.kernels.mosaic_tpu.plan import VMEM_LIMIT, Plan

__all__ = ["Gradients", "backward"]


class Gradients(NamedTuple, Generic[A]):
    """Gradients in the layout of `Inputs`; those of q and k once per cell that reads the head."""

    q: A
    k: A
    v: A
    beta: A | None
    # Of the cumulative sum of a scalar gate, [cells, N, G, C], or of a vector gate.
    gate: A | None
    state: A  # [BHV, K, V]


class _Rule(NamedTuple):
    """Values of the delta rule in a chunk, recomputed from the state and the inverse."""

    beta: jax.Array  # [G, C, 1]
    T: jax.Array
    M: jax.Array
    E: jax.Array
    U: jax.Array


class _RuleGradients(NamedTuple):
    M: jax.Array
    k: jax.Array  # what reading the state gives
    beta: jax.Array  # [G, C, 1]


def _rule(
    x: Inputs[jax.Array], saved: Saved[jax.Array], decay: Decay, scores: Scores, plan: Plan
) -> _Rule | None:
    if x.beta is None or saved.inverse is None or scores.M is None:
        return None
    k, p = tile.per_value_head(x.k[...], plan.heads), plan.precision
    beta, T = tile.columns(x.beta[...]), saved.inverse[...]
    E = x.v[...].astype(jnp.float32) - tile.read(k, decay.from_start, saved.states[...], p)
    return _Rule(beta, T, scores.M, E, tile.accurate(tile.mm, T, beta * E, p))


def _kernel(
    x: Inputs[jax.Array],
    saved: Saved[jax.Array],
    do_ref: jax.Array,
    d_final: jax.Array,
    out: Gradients[jax.Array],
    *,
    plan: Plan,
) -> None:
    dtype, p = x.q.dtype, plan.precision

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        out.state[...] = d_final[...]

    do, s, dS = do_ref[...], saved.states[...], out.state[...]
    k, q = (tile.per_value_head(ref[...], plan.heads) for ref in (x.k, x.q))
    decay = read_decay(x.gate, plan.chunk)
    scores = decay.scores(x.q[...], x.k[...], plan.heads, p, delta=plan.delta)
    rule = _rule(x, saved, decay, scores, plan)
    U = x.v[...].astype(jnp.float32) if rule is None else rule.U
    u, ds = U.astype(dtype), dS.astype(dtype)

    dU = plan.scale * tile.mm_tn(scores.A.astype(dtype), do, p)
    dU += tile.read(k, decay.to_end, ds, p)
    dA = plan.scale * tile.mm_nt(do, u, p)
    dq_start = plan.scale * tile.scaled(tile.mm_nt(do, s, p), decay.from_start)
    dk_end = tile.scaled(tile.mm_nt(u, ds, p), decay.to_end)
    out.state[...] = tile.scaled(dS, decay.total)
    out.state[...] += tile.write(q, decay.from_start, tile.scaled(do, plan.scale), p)
    dM, from_start, dk = None, q * dq_start, dk_end
    if rule is None:
        out.v[...] = dU.astype(dtype)
    else:
        d = _rule_gradients(rule, dU, k, s, decay, out, plan)
        if out.beta is not None:
            out.beta[...] = tile.to_rows(d.beta)
        dM, from_start, dk = d.M, from_start + k * d.k, dk + d.k
    total = tile.row_sum(s.astype(jnp.float32) * dS)
    carried = Carried(from_start, k * dk_end, total)
    dq_pairs, dk_pairs, gate = decay.pull(scores, Scores(dA, dM), q, k, carried, p)
    if out.gate is not None:
        out.gate[...] = gate
    dq, dk = dq_start + dq_pairs, dk + dk_pairs
    out.q[...] = tile.per_key_head(dq, plan.key_heads).astype(out.q.dtype)
    out.k[...] = tile.per_key_head(dk, plan.key_heads).astype(out.k.dtype)


def _rule_gradients(
    rule: _Rule,
    dU: jax.Array,
    k: jax.Array,
    s: jax.Array,
    decay: Decay,
    out: Gradients[jax.Array],
    plan: Plan,
) -> _RuleGradients:
    """Differentiate `U = T (beta (v - (k * exp(b)) S))`: write dv, add to `dS`."""
    p = plan.precision
    dR = tile.accurate(tile.mm_tn, rule.T, dU, p)
    dv = rule.beta * dR
    low = dv.astype(k.dtype)
    # The two terms of dbeta nearly cancel where keys are similar.
    dL = -tile.accurate(tile.mm_nt, dR, rule.U, p)
    out.v[...] = low
    out.state[...] -= tile.write(k, decay.from_start, dv, p)
    dk = -tile.scaled(tile.mm_nt(low, s, p), decay.from_start)
    dbeta = tile.row_sum(dR * rule.E) + tile.row_sum(dL * rule.M)
    return _RuleGradients(rule.beta * dL, dk, dbeta)


def backward(
    x: Inputs[jax.Array], saved: Saved[jax.Array], do: jax.Array, d_final: jax.Array, plan: Plan
) -> Gradients[jax.Array]:
    """Gradients of everything that the forward kernel read."""
    (cells, N, G, C, V), K, dtype = x.v.shape, x.q.shape[-1], x.q.dtype
    specs = Specs(plan, K, V, lambda n: N - 1 - n)
    # Key heads read by several cells: each writes its share, in float32, for the caller to sum.
    shared = plan.group > plan.heads
    keys = type_like(x.v, (cells, N, plan.key_heads, C, K), jnp.float32 if shared else dtype)
    rows = type_like(x.v, (cells, N, G, C), jnp.float32)
    call = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(cells, N),
        in_specs=[specs.inputs(x), specs.saved(plan), specs.values, specs.state],
        out_specs=[
            Gradients(
                specs.key_grads,
                specs.key_grads,
                specs.values,
                specs.rows if plan.delta else None,
                specs.inputs(x).gate[0] if x.gate else None,
                specs.state,
            )
        ],
        out_shape=[
            Gradients(
                keys,
                keys,
                type_like(x.v, x.v.shape, dtype),
                rows if plan.delta else None,
                type_like(x.v, x.gate[0].shape, jnp.float32) if x.gate else None,
                type_like(x.v, (cells * G, K, V), jnp.float32),
            )
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=plan.interpret,
        name="deltanet_backward",
    )
    grads: Gradients[jax.Array]
    (grads,) = call(x, saved, do, d_final)
    return grads
