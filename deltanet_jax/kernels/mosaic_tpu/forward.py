"""The forward kernel: chunk after chunk, the state of a cell of heads stays in VMEM.

::

    E = v - (k * exp(b)) S        R = beta E        U = T R
    o = scale ((q * exp(b)) S + tril(P(q, k)) U)
    S' = exp(b_C) S + (k * exp(b_C - b))^T U

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
from deltanet_jax.kernels.mosaic_tpu.decay import read_decay
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
    decay = read_decay(x.gate, plan.chunk)
    scores = decay.scores(q, k, plan.heads, p, delta=plan.delta)
    U = v.astype(jnp.float32)
    if x.beta is not None and scores.M is not None:
        beta = tile.columns(x.beta[...])
        T = tile.unit_lower_inverse(beta * scores.M, p)
        E = U - tile.read(kv, decay.from_start, s, p)
        U = tile.accurate(tile.mm, T, beta * E, p)
        if saved is not None and saved.inverse is not None:
            saved.inverse[...] = T
    A = scores.A.astype(dtype)
    o = tile.read(qv, decay.from_start, s, p) + tile.mm(A, U.astype(dtype), p)
    o_ref[...] = (plan.scale * o).astype(o_ref.dtype)
    state_ref[...] = tile.scaled(S, decay.total) + tile.write(kv, decay.to_end, U, p)
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
