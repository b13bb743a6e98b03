"""The forward kernel: chunk after chunk, the state of a cell of heads stays in VMEM.

::

    E = v - exp(b) (k S)        R = beta E        U = T R
    o = scale (exp(b) (q S) + tril(P(q, k)) U)
    S' = exp(b_C) S + k^T (exp(b_C - b) U)

Without the delta rule `U = v`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deltanet_jax.compat import type_like
from deltanet_jax.kernels.mosaic_tpu import tile
from deltanet_jax.kernels.mosaic_tpu.blocks import Inputs, Saved, Specs
from deltanet_jax.kernels.mosaic_tpu.plan import VMEM_LIMIT, Plan

__all__ = ["forward"]


def _kernel(
    x: Inputs[jax.Array],
    initial: jax.Array,
    o_ref: jax.Array,
    state_ref: jax.Array,
    saved: Saved[jax.Array] | None,
    *,
    plan: Plan,
) -> None:
    dtype, p = x.q.dtype, plan.precision

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        state_ref[...] = initial[...]

    q, k, v, S = x.q[...], x.k[...], x.v[...], state_ref[...]
    s = S.astype(dtype)
    kv, qv = tile.per_value_head(k, plan.heads), tile.per_value_head(q, plan.heads)
    decay = tile.read_decay(x.coarse, x.fine, plan.chunk)
    U = v.astype(jnp.float32)
    if x.beta is not None:
        beta = tile.columns(x.beta[...])
        kk = tile.per_value_head(tile.mm_nt(k, k, p), plan.heads)
        T = tile.unit_lower_inverse(beta * (kk * decay.earlier), p)
        E = U - tile.scaled(tile.mm(kv, s, p), decay.from_start)
        U = tile.accurate(tile.mm, T, beta * E, p)
        if saved is not None and saved.inverse is not None:
            saved.inverse[...] = T
    qk = tile.per_value_head(tile.mm_nt(q, k, p), plan.heads)
    A = (qk * decay.pairs).astype(dtype)
    o = tile.scaled(tile.mm(qv, s, p), decay.from_start) + tile.mm(A, U.astype(dtype), p)
    o_ref[...] = (plan.scale * o).astype(o_ref.dtype)
    u_end = tile.scaled(U, decay.to_end).astype(dtype)
    state_ref[...] = tile.scaled(S, decay.total) + tile.mm_tn(kv, u_end, p)
    if saved is not None:
        saved.states[...] = s


def forward(
    x: Inputs[jax.Array], initial: jax.Array, plan: Plan, *, save: bool
) -> tuple[jax.Array, jax.Array, Saved[jax.Array] | None]:
    """Outputs as `v`, the final state and, to `save`, what the backward kernel needs."""
    (cells, N, G, C, V), K, dtype = x.v.shape, x.q.shape[-1], x.q.dtype
    specs = Specs(plan, K, V, lambda n: n)
    saved = None
    if save:
        inverse = type_like(x.v, (cells, N, G, C, C), jnp.float32) if plan.delta else None
        saved = Saved(type_like(x.v, (cells, N, G, K, V), dtype), inverse)
    call = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(cells, N),
        in_specs=[specs.inputs(x), specs.state],
        out_specs=[specs.values, specs.state, specs.saved(plan) if save else None],
        out_shape=[
            type_like(x.v, x.v.shape, dtype),
            type_like(x.v, (cells * G, K, V), jnp.float32),
            saved,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=plan.interpret,
        name="deltanet_forward",
    )
    o, final, saved = call(x, initial)
    return o, final, saved
