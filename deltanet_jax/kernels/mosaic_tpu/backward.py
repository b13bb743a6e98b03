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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deltanet_jax.kernels.mosaic_tpu import tile
from deltanet_jax.kernels.mosaic_tpu.blocks import Inputs, Saved, Specs, like
from deltanet_jax.kernels.mosaic_tpu.plan import VMEM_LIMIT, Plan

__all__ = ["Gradients", "backward"]


class Gradients(NamedTuple):
    """Gradients in the layout of `Inputs`; those of q and k once per cell that reads the head."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array | None
    b: jax.Array | None  # of the cumulative log-decay
    state: jax.Array  # [BHV, K, V]


def _kernel(
    x: Inputs, saved: Saved, do_ref: jax.Array, d_final: jax.Array, out: Gradients, *, plan: Plan
) -> None:
    dtype, p, G = x.q.dtype, plan.precision, plan.heads

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        out.state[...] = d_final[...]

    q, k, v, do, s = x.q[...], x.k[...], x.v[...], do_ref[...], saved.states[...]
    kv, qv = tile.per_value_head(k, G), tile.per_value_head(q, G)
    dS = out.state[...]
    ds = dS.astype(dtype)
    decay = tile.decay_factors(_read(x.coarse), _read(x.fine), plan.chunk)
    qk = tile.per_value_head(tile.mm_nt(q, k, p), G)

    # The chunk again, from the state and the inverse that the forward kernel kept.
    U = v.astype(jnp.float32)
    if plan.delta:
        beta, T = tile.columns(x.beta[...]), saved.inverse[...]
        kk = tile.per_value_head(tile.mm_nt(k, k, p), G)
        read = tile.scaled(tile.mm(kv, s, p), decay.from_start)
        E = U - read
        U = tile.accurate(tile.mm, T, beta * E, p)
    u = U.astype(dtype)

    to_end = tile.scaled(tile.mm(kv, ds, p), decay.to_end)
    A = (qk * decay.pairs).astype(dtype)
    dU = plan.scale * tile.mm_tn(A, do, p) + to_end
    dqk = plan.scale * (tile.mm_nt(do, u, p) * decay.pairs)
    dq_start = plan.scale * tile.scaled(tile.mm_nt(do, s, p), decay.from_start)
    do_start = (plan.scale * tile.scaled(do, decay.from_start)).astype(dtype)
    u_end = tile.scaled(U, decay.to_end).astype(dtype)
    dq = dq_start + tile.mm(dqk.astype(dtype), kv, p)
    dk = tile.mm_nt(u_end, ds, p) + tile.mm_tn(dqk.astype(dtype), qv, p)
    d_state = tile.scaled(dS, decay.total) + tile.mm_tn(qv, do_start, p)
    dv, pairs, db = dU, dqk * qk, tile.row_sum(qv.astype(jnp.float32) * dq_start)
    if plan.delta:
        dR = tile.accurate(tile.mm_tn, T, dU, p)
        dv = beta * dR
        de = tile.scaled(dv, decay.from_start).astype(dtype)
        # The two halves of dbeta nearly cancel where keys are alike.
        dkk = -(tile.accurate(tile.mm_nt, dR, U, p) * decay.earlier)
        out.beta[...] = tile.to_rows(tile.row_sum(dR * E) + tile.row_sum(dkk * kk))
        dkk = beta * dkk
        dk -= tile.mm_nt(de, s, p)
        dk += tile.mm(dkk.astype(dtype), kv, p) + tile.mm_tn(dkk.astype(dtype), kv, p)
        d_state -= tile.mm_tn(kv, de, p)
        pairs, db = pairs + dkk * kk, db - tile.row_sum(dv * read)
    if plan.gated:
        ends = tile.row_sum(U * to_end)
        total = tile.scaled(
            jnp.sum(s.astype(jnp.float32) * dS, axis=(1, 2), keepdims=True), decay.total
        )
        out.b[...] = _decay_gradient(pairs, db - ends, total + jnp.sum(ends, axis=1, keepdims=True))
    out.q[...] = tile.per_key_head(dq, plan.key_heads).astype(out.q.dtype)
    out.k[...] = tile.per_key_head(dk, plan.key_heads).astype(out.k.dtype)
    out.v[...] = dv.astype(dtype)
    out.state[...] = d_state


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


def _read(ref: jax.Array | None) -> jax.Array | None:
    return None if ref is None else ref[...]


def backward(x: Inputs, saved: Saved, do: jax.Array, d_final: jax.Array, plan: Plan) -> Gradients:
    """Gradients of everything that the forward kernel read."""
    (BHV, T, V), K, dtype = x.v.shape, x.q.shape[-1], x.q.dtype
    N = T // plan.chunk
    specs = Specs(plan, K, V, lambda n: N - 1 - n)
    cells = BHV // plan.heads
    # Key heads read by several cells: each writes its share, in float32, for the caller to sum.
    shared = plan.group > plan.heads
    keys = like(x.v, (cells * plan.key_heads, T, K), jnp.dtype(jnp.float32) if shared else dtype)
    rows = like(x.v, (cells, N, plan.heads, plan.chunk), jnp.dtype(jnp.float32))
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
                like(x.v, x.v.shape, dtype),
                rows if plan.delta else None,
                rows if plan.gated else None,
                like(x.v, (BHV, K, V), jnp.dtype(jnp.float32)),
            )
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=plan.interpret,
        name="deltanet_backward",
    )
    (grads,) = call(x, saved, do, d_final)
    return grads
