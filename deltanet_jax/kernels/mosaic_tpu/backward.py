"""The backward kernel: chunks in reverse, the gradient of the state stays in VMEM.

With `R = beta E`, `U = T R`, `A = tril(P(q, k))`, `M = stril(P(k, k))`, `L = beta M`::

    dU = scale A^T do + exp(b_C - b) (k dS')      dR = T^T dU          dE = dv = beta dR
    dA = scale tril(do U^T)                       dL = -stril(dR U^T)  dM = beta dL
    dq = scale exp(b) (do S^T) + (dA * D) k       with D_ij = exp(b_i - b_j)
    dk = exp(b_C - b) (U dS'^T) - exp(b) (dE S^T) + (dA * D)^T q + (dM * D) k + (dM * D)^T k
    dS = exp(b_C) dS' + q^T (scale exp(b) do) - k^T (exp(b) dE)
    dbeta = rowsum(dR * E) + rowsum(dL * M)

and every exponential passes its own product on to the b that it holds.
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
from deltanet_jax.kernels.mosaic_tpu.plan import VMEM_LIMIT, Plan

__all__ = ["Gradients", "backward"]


class Gradients(NamedTuple, Generic[A]):
    """Gradients in the layout of `Inputs`; those of q and k once per cell that reads the head."""

    q: A
    k: A
    v: A
    beta: A | None
    b: A | None  # of the cumulative log-decay
    state: A  # [BHV, K, V]


class _Rule(NamedTuple):
    """What the delta rule computes in a chunk, again from the state and the inverse."""

    beta: jax.Array  # [G, C, 1]
    T: jax.Array
    kk: jax.Array  # k k^T
    read: jax.Array  # exp(b) (k S)
    E: jax.Array  # v - read
    U: jax.Array


def _rule(
    x: Inputs[jax.Array], saved: Saved[jax.Array], decay: tile.Decay, plan: Plan
) -> _Rule | None:
    if x.beta is None or saved.inverse is None:
        return None
    k, p, G = x.k[...], plan.precision, plan.heads
    beta, T = tile.columns(x.beta[...]), saved.inverse[...]
    kk = tile.per_value_head(tile.mm_nt(k, k, p), G)
    read = tile.mm(tile.per_value_head(k, G), saved.states[...], p)
    read = tile.scaled(read, decay.from_start)
    E = x.v[...].astype(jnp.float32) - read
    return _Rule(beta, T, kk, read, E, tile.accurate(tile.mm, T, beta * E, p))


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
    decay = tile.read_decay(x.coarse, x.fine, plan.chunk)
    rule = _rule(x, saved, decay, plan)
    U = x.v[...].astype(jnp.float32) if rule is None else rule.U
    u, ds = U.astype(dtype), dS.astype(dtype)

    qk = tile.per_value_head(tile.mm_nt(x.q[...], x.k[...], p), plan.heads)
    to_end = tile.scaled(tile.mm(k, ds, p), decay.to_end)
    dU = plan.scale * tile.mm_tn((qk * decay.pairs).astype(dtype), do, p) + to_end
    dqk = plan.scale * (tile.mm_nt(do, u, p) * decay.pairs)
    dq_start = plan.scale * tile.scaled(tile.mm_nt(do, s, p), decay.from_start)
    do_start = (plan.scale * tile.scaled(do, decay.from_start)).astype(dtype)
    u_end = tile.scaled(U, decay.to_end).astype(dtype)
    dq = dq_start + tile.mm(dqk.astype(dtype), k, p)
    dk = tile.mm_nt(u_end, ds, p) + tile.mm_tn(dqk.astype(dtype), q, p)
    out.state[...] = tile.scaled(dS, decay.total) + tile.mm_tn(q, do_start, p)
    pairs, db = dqk * qk, tile.row_sum(q.astype(jnp.float32) * dq_start)
    if rule is None:
        out.v[...] = dU.astype(dtype)
    else:
        dk_rule, pairs_rule, db_rule, dbeta = _rule_gradients(rule, dU, k, s, decay, out, plan)
        if out.beta is not None:
            out.beta[...] = tile.to_rows(dbeta)
        dk, pairs, db = dk + dk_rule, pairs + pairs_rule, db + db_rule
    if out.b is not None:
        ends = tile.row_sum(U * to_end)
        total = jnp.sum(s.astype(jnp.float32) * dS, axis=(1, 2), keepdims=True)
        last = tile.scaled(total, decay.total) + jnp.sum(ends, axis=1, keepdims=True)
        out.b[...] = _decay_gradient(pairs, db - ends, last)
    out.q[...] = tile.per_key_head(dq, plan.key_heads).astype(out.q.dtype)
    out.k[...] = tile.per_key_head(dk, plan.key_heads).astype(out.k.dtype)


def _rule_gradients(
    rule: _Rule,
    dU: jax.Array,
    k: jax.Array,
    s: jax.Array,
    decay: tile.Decay,
    out: Gradients[jax.Array],
    plan: Plan,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Through `U = T (beta (v - exp(b) (k S)))`: writes dv, adds to the state's gradient.

    Returns:
        The share of dk; that of the pairwise decays; that of `b`; dbeta.
    """
    dtype, p = k.dtype, plan.precision
    dR = tile.accurate(tile.mm_tn, rule.T, dU, p)
    dv = rule.beta * dR
    de = tile.scaled(dv, decay.from_start).astype(dtype)
    # The two halves of dbeta nearly cancel where keys are alike.
    dL = -(tile.accurate(tile.mm_nt, dR, rule.U, p) * decay.earlier)
    out.v[...] = dv.astype(dtype)
    dbeta = tile.row_sum(dR * rule.E) + tile.row_sum(dL * rule.kk)
    out.state[...] -= tile.mm_tn(k, de, p)
    dkk = rule.beta * dL
    low = dkk.astype(dtype)
    dk = tile.mm(low, k, p) + tile.mm_tn(low, k, p) - tile.mm_nt(de, s, p)
    return dk, dkk * rule.kk, -tile.row_sum(dv * rule.read), dbeta


def _decay_gradient(pairs: jax.Array, rows: jax.Array, last: jax.Array) -> jax.Array:
    """The gradient of `b`, `[G, C]`, from its share in every product.

    Args:
        pairs: Products of the exponentials `exp(b_i - b_j)` with their gradients, `[G, C, C]`.
        rows: What belongs to `b_i` alone, `[G, C, 1]`.
        last: What belongs to `b_C`, `[G, 1, 1]`.
    """
    i, j = tile.positions(pairs.shape[-1])
    pairs = jnp.where(i > j, pairs, 0.0)  # the diagonal cancels; its rounding would not
    rows += tile.row_sum(pairs)
    at_end = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1) == rows.shape[1] - 1
    return tile.to_rows(rows + jnp.where(at_end, last, 0.0)) - jnp.sum(pairs, axis=1)


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
                specs.rows if plan.gated else None,
                specs.state,
            )
        ],
        out_shape=[
            Gradients(
                keys,
                keys,
                type_like(x.v, x.v.shape, dtype),
                rows if plan.delta else None,
                rows if plan.gated else None,
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
