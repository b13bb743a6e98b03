"""Gradients of the states and of the values, from the last chunk to the first.

Rows of one chunk, `G = dL/dS'` over `scale` of the state leaving it, in float32 registers::

    dw = tril(D * (q k^T))^T do + exp(b_C - b) k G       of what is written, over scale
    dv = T^T (beta dw)                                   without the delta rule: dv = dw
    G = exp(b_C) G + q^T (exp(b) do) - k^T (exp(b) dv)   without the delta rule: no last term

The columns of V of one warpgroup are one of the `planes` in which `G` is stored.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import program, state_planes
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, mma, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.program import WIDTH, Inputs, Own, Pipeline, Place, Plan
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["StateGradients", "reverse_states"]

SHAPE = (CHUNK, WIDTH)


class StateGradients(NamedTuple):
    """Results of `reverse_states`, but for `dv` over scale."""

    dstate: Ref  # of the initial state, [B, HV, K, V] float32
    dv: Ref  # [B, T, HV, V]
    planes: tuple[Ref, ...]  # of the state leaving each chunk, each [B, T, HV, K]


def _write_cotangent(
    plan: Plan, tile: Inputs, state: Ref, wait_scores: Callable[[], None]
) -> jax.Array:
    """Compute `dw`, over scale."""
    read = tile.writing, smem.transposed(state)
    own = smem.transposed(tile.scores), tile.do
    if not plan.shape.scalar_gate:
        wait_scores()
        return mma.product(SHAPE, own, read)
    dw = mma.product(SHAPE, read)
    dw *= smem.over_rows(jnp.exp(tile.b[CHUNK - 1] - smem.row(tile.b)), SHAPE)
    wait_scores()
    return mma.product(SHAPE, own, init=dw, interpret=plan.interpret)


def _decayed(plan: Plan, tile: Inputs, state: list[jax.Array]) -> list[jax.Array]:
    """Multiply the blocks of the state gradient by the decay over the chunk."""
    if plan.shape.vector_gate:
        kept = [smem.row(tile.kept.at[rows]) for rows in plan.rows]
        return [x * smem.over_rows(y, SHAPE) for x, y in zip(state, kept, strict=True)]
    if plan.shape.scalar_gate:
        total = jnp.exp(tile.b[CHUNK - 1])
        return [x * total for x in state]
    return state


def _chunk(
    plan: Plan,
    tile: Inputs,
    own: Own,
    wait_scores: Callable[[], None],
    dv_target: Ref,
    state: list[jax.Array],
) -> list[jax.Array]:
    """Walk one chunk; return the gradient of the state before it."""
    dv = _write_cotangent(plan, tile, own.state, wait_scores)
    if plan.shape.delta:
        weighted = dv * smem.over_rows(smem.row(tile.beta), SHAPE)
        parts = [(own.error, weighted.astype(plan.shape.dtype))]
        if plan.precise:
            high, low = lanes.halves(weighted, interpret=plan.interpret)
            parts = [(own.error, high), (own.dv, low)]
        for part, x in parts:
            part[...] = x
        plgpu.commit_smem()
        inverse = smem.transposed(tile.inverse)
        dv = mma.product(SHAPE, *((inverse, part) for part, _ in parts))
    if not plan.only_state:
        own.dv[...] = (dv * plan.scale).astype(plan.shape.dtype)
    if plan.shape.scalar_gate:
        decay = smem.over_rows(jnp.exp(smem.row(tile.b)), SHAPE)
        dv *= decay
        tile.do[...] = (smem.matrix(tile.do) * decay).astype(plan.shape.dtype)
    state = _decayed(plan, tile, state)
    if plan.shape.delta:
        own.error[...] = (-dv).astype(plan.shape.dtype)
    plgpu.commit_smem()
    if not plan.only_state:
        plgpu.copy_smem_to_gmem(own.dv, dv_target)
    steps = []
    for block, rows in zip(state, plan.rows, strict=True):
        pairs = [(smem.transposed(tile.q.at[:, rows]), tile.do)]
        if plan.shape.delta:
            pairs += [(smem.transposed(tile.k.at[:, rows]), own.error)]
        steps += [(block, pairs)]
    return mma.accumulate(*steps, interpret=plan.interpret)


def _walk(
    plan: Plan,
    refs: Inputs,
    out: StateGradients,
    own: Callable[[], Own],
    pipeline: Pipeline,
    place: Place,
) -> None:
    """Walk the chunks of one warpgroup's columns."""
    batch, head, columns = place

    def store_cotangent(tile: Ref, tokens: Any) -> None:
        # Recomputed: held in a register over the loop, it would make others spill.
        own_plane = program.plane(plan)
        for i, plane in enumerate(out.planes):
            target = plane.at[batch, tokens, head]
            store = functools.partial(plgpu.copy_smem_to_gmem, tile, target)
            pl.when(own_plane == i)(store)

    def step(i: Index, state: list[jax.Array]) -> list[jax.Array]:
        chunk, stored = plan.shape.chunks - 1 - i, own().state
        # The stores of the chunk before read the tiles that this one fills.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for rows, block in zip(plan.rows, state, strict=True):
            low = block.astype(plan.shape.dtype)
            smem.store_transposed(stored.at[:, rows], low, interpret=plan.interpret)
        plgpu.commit_smem()
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        if not plan.only_state:
            store_cotangent(stored, tokens)
        tile, tiles = pipeline.wait(i)
        target = None if plan.only_state else out.dv.at[batch, tokens, head, columns]
        state = _chunk(plan, tile, tiles, lambda: pipeline.wait_scores(i), target, list(state))
        pipeline.release(i)
        return state

    places = [(batch, head, rows, columns) for rows in plan.rows]
    state = [smem.zeros(SHAPE) for _ in places]
    if refs.state is not None:
        state = [smem.load_f32(refs.state.at[at]) for at in places]
    state = lax.fori_loop(0, plan.shape.chunks, step, state)
    if out.dstate is not None:
        for at, block in zip(places, state, strict=True):
            out.dstate.at[at][...] = block
    plgpu.wait_smem_to_gmem(0)


def reverse_states(
    shape: Shape,
    inputs: Inputs,
    do: jax.Array,
    dstate: jax.Array | None,
    *,
    scale: float,
    start: bool = True,
    only_state: bool = False,
    interpret: object = None,
) -> StateGradients:
    """Compute gradients of the values, and of the state around every chunk.

    Args:
        shape: Sizes and variant of the call.
        inputs: Keys, queries, gates and inverses.
        do: Gradient of the outputs, `[B, T, HV, V]` with T a multiple of 64.
        dstate: Gradient of the final state over `scale`, `[B, HV, K, V]` float32, or `None` for
            zeros.
        scale: Factor on `q`.
        start: Whether to return `dstate`.
        only_state: Whether to return `dstate` alone.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The gradients.
    """
    plan = Plan(
        shape=shape,
        scale=float(scale),
        only_state=only_state,
        reverse=True,
        interpret=interpret is not None,
    )
    own = Own(
        dv=None if only_state else plan.own_tile(*SHAPE),
        error=plan.own_tile(*SHAPE) if shape.delta else None,
        state=plan.own_tile(WIDTH, shape.key_dim),
    )
    array = jax.ShapeDtypeStruct
    first = array((shape.batch, shape.heads, shape.key_dim, shape.value_dim), jnp.float32)
    plane = array((*do.shape[:3], shape.key_dim), do.dtype)
    outputs = StateGradients(
        dstate=first if start else None,
        dv=None if only_state else array(do.shape, do.dtype),
        planes=() if only_state else (plane,) * state_planes.count(shape),
    )
    return program.launch(
        "reverse_states",
        plan,
        _walk,
        inputs._replace(do=do, b_column=inputs.b, decay=None, rest=None, state=dstate),
        outputs,
        own,
        automatic_barriers=True,
        interpret=interpret,
    )
