"""Gradients of the states and of the values, from the last chunk to the first.

Rows of one chunk, `G = dL/dS'` over `scale` of the state leaving it, in float32 registers::

    dw = tril(D * (q k^T))^T do + exp(b_C - b) k G       of what is written, over scale
    dv = T^T (beta dw)                                   without the delta rule: dv = dw
    G = exp(b_C) G + q^T (exp(b) do) - k^T (exp(b) dv)   without the delta rule: no last term

The columns of V of one warpgroup are one of the `planes` in which `G` is stored.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import program, state_planes
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, mma, smem
from deltanet_jax.kernels.mosaic_gpu.program import WIDTH, Plan
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["reverse_states"]

SHAPE = (CHUNK, WIDTH)


def _write_cotangent(plan: Plan, tile, wait_scores):
    """Compute `dw`, over scale."""
    read = tile[plan.writes], smem.transposed(tile["state"])
    own = smem.transposed(tile["scores"]), tile["do"]
    if not plan.shape.scalar_gate:
        wait_scores()
        return mma.product(SHAPE, own, read)
    dw = mma.product(SHAPE, read)
    dw *= smem.over_rows(jnp.exp(tile["b"][CHUNK - 1] - smem.row(tile["b"])), SHAPE)
    wait_scores()
    return mma.product(SHAPE, own, init=dw, interpret=plan.interpret)


def _decayed(plan: Plan, tile, state: list) -> list:
    """Multiply the blocks of the state gradient by the decay over the chunk."""
    if plan.shape.vector_gate:
        kept = [smem.row(tile["kept"].at[rows]) for rows in plan.rows]
        return [x * smem.over_rows(y, SHAPE) for x, y in zip(state, kept, strict=True)]
    if plan.shape.scalar_gate:
        kept = jnp.exp(tile["b"][CHUNK - 1])
        return [x * kept for x in state]
    return state


def _chunk(plan: Plan, refs, tile, wait_scores, tokens, state):
    """Walk one chunk; return the gradient of the state before it."""
    dv = _write_cotangent(plan, tile, wait_scores)
    if plan.shape.delta:
        weighted = dv * smem.over_rows(smem.row(tile["beta"]), SHAPE)
        parts = {"error": weighted.astype(plan.shape.dtype)}
        if plan.precise:
            halves = lanes.halves(weighted, interpret=plan.interpret)
            parts = dict(zip(("error", "dv"), halves, strict=True))
        for name, part in parts.items():
            tile[name][...] = part
        plgpu.commit_smem()
        inverse = smem.transposed(tile["inverse"])
        dv = mma.product(SHAPE, *((inverse, tile[name]) for name in parts))
    if not plan.only_state:
        tile["dv"][...] = (dv * plan.scale).astype(plan.shape.dtype)
    if plan.shape.scalar_gate:
        decay = smem.over_rows(jnp.exp(smem.row(tile["b"])), SHAPE)
        dv *= decay
        tile["do"][...] = (smem.matrix(tile["do"]) * decay).astype(plan.shape.dtype)
    state = _decayed(plan, tile, state)
    if plan.shape.delta:
        tile["error"][...] = (-dv).astype(plan.shape.dtype)
    plgpu.commit_smem()
    if not plan.only_state:
        plgpu.copy_smem_to_gmem(tile["dv"], refs["dv"].at[tokens])
    steps = []
    for block, rows in zip(state, plan.rows, strict=True):
        pairs = [(smem.transposed(tile["q"].at[:, rows]), tile["do"])]
        if plan.shape.delta:
            pairs += [(smem.transposed(tile["k"].at[:, rows]), tile["error"])]
        steps += [(block, pairs)]
    return mma.accumulate(*steps, interpret=plan.interpret)


def _walk(plan: Plan, refs, own, turns, batch, head, columns):
    """Walk the chunks of one warpgroup's columns."""

    def store_cotangent(tile, tokens):
        # Recomputed: held in a register over the loop, it would make others spill.
        plane = program.plane(plan)
        for i, name in enumerate(state_planes.planes_of(plan.shape.value_dim)):
            target = refs[name].at[batch, tokens, head]
            store = functools.partial(plgpu.copy_smem_to_gmem, tile, target)
            pl.when(plane == i)(store)

    def step(i, state):
        chunk, tile = plan.shape.chunks - 1 - i, own()["state"]
        # The stores of the chunk before read the tiles that this one fills.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for rows, block in zip(plan.rows, state, strict=True):
            low = block.astype(plan.shape.dtype)
            smem.store_transposed(tile.at[:, rows], low, interpret=plan.interpret)
        plgpu.commit_smem()
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        if not plan.only_state:
            store_cotangent(tile, tokens)
        tile = turns.wait(i)
        tokens = (batch, tokens, head, columns)
        state = _chunk(plan, refs, tile, lambda: turns.wait_scores(i), tokens, list(state))
        turns.free(i)
        return state

    places = [(batch, head, rows, columns) for rows in plan.rows]
    state = [smem.zeros(SHAPE) for _ in places]
    if "end" in refs:
        state = [smem.load_f32(refs["end"].at[place]) for place in places]
    state = lax.fori_loop(0, plan.shape.chunks, step, state)
    if "dstate" in refs:
        for place, block in zip(places, state, strict=True):
            refs["dstate"].at[place][...] = block
    plgpu.wait_smem_to_gmem(0)


def reverse_states(
    shape: Shape, q, k, do, inverse, dstate, *,
    beta, b, channels=None, scale, start=True, only_state=False, interpret=None,
):  # fmt: skip
    """Compute gradients of the values, and of the state around every chunk.

    Args:
        shape: Sizes and variant of the call.
        q: `[B, T, H, K]` with T a multiple of 64.
        k: The same shape.
        do: Gradient of the outputs, `[B, T, HV, V]`.
        inverse: `[B, N, HV, C, C]`, or `None` without the delta rule.
        dstate: Gradient of the final state over `scale`, `[B, HV, K, V]` float32, or `None` for
            zeros.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        b: In-chunk cumulative log-decay of a scalar gate, `[B, N, HV, C]` float32, or `None`.
        channels: With a vector gate, `writes`, `scores` and `kept` of `decayed_chunks`;
            `q` and `k` then are its `queries` and `keys`.
        scale: Factor on `q`.
        start: Whether to return `dstate`.
        only_state: Whether to return `dstate` alone.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        A dictionary: `dv` `[B, T, HV, V]`; over `scale`, the gradients of the state leaving each
        chunk in `planes` by name, each `[B, T, HV, K]`, and, if `start`, that of the initial
        state `dstate` `[B, HV, K, V]`, float32.
    """
    vectors = program.vectors_of(beta, b)
    plan = Plan(
        shape=shape,
        scale=float(scale),
        only_state=only_state,
        reverse=True,
        interpret=interpret is not None,
    )
    inputs = {"do": do} | program.inputs_of(q, k, inverse, vectors, channels)
    if dstate is not None:
        inputs |= {"end": dstate}
    own = {"state": (WIDTH, shape.key_dim)}
    if not only_state:
        own |= {"dv": SHAPE}
    if shape.delta:
        own |= {"error": SHAPE}
    array = jax.ShapeDtypeStruct
    first = (shape.batch, shape.heads, shape.key_dim, shape.value_dim)
    outputs = {"dstate": array(first, jnp.float32)} if start else {}
    if not only_state:
        plane = array((*do.shape[:3], shape.key_dim), do.dtype)
        outputs |= {"dv": array(do.shape, do.dtype)}
        outputs |= dict.fromkeys(state_planes.planes_of(shape.value_dim), plane)
    return program.launch(
        "reverse_states", plan, _walk, inputs, outputs, own,
        values="do", interpret=interpret,
    )  # fmt: skip
