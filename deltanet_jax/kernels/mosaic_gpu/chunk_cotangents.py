"""Gradients of the results of `decayed_chunks`, for all chunks in parallel.

Rows of one chunk, `S` its incoming state, `G = dL/dS'` of its outgoing state over `scale`, `u` its
corrected values (`v` without the delta rule)::

    dqueries = scale * do S^T        dscores   = scale * tril(do u^T) beta_j
    dkeys    = -dv S^T               doverlaps = -stril(dv u^T) beta_j
    dwrites  = scale * beta_i u G^T  dkept     = scale * rowsum(S * G)
    dbeta    = diag(dv u^T) / beta

and where beta is small::

    dbeta = scale * (rowsum(writes * (u G^T)) + diag(scores^T tril(do u^T)))
            - diag(overlaps^T stril(dv u^T))
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import state_planes
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, launches, mma, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.pipeline import unravel
from deltanet_jax.kernels.mosaic_gpu.chunk_gradients import SMALL_BETA
from deltanet_jax.kernels.mosaic_gpu.decayed_chunks import DecayedChunks, types_of
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["OperandGradients", "chunk_cotangents"]

WIDTH = 64  # channels at a time
SQUARE = (CHUNK, CHUNK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch; a thread block has one chunk of one head."""

    shape: Shape
    interpret: bool
    scale: float


class Inputs(NamedTuple):
    """Arrays that the kernel reads; the last five are there with the delta rule alone."""

    do: Ref
    u: Ref
    state: Ref
    planes: tuple[Ref, ...]  # of the state gradients
    dv: Ref
    beta: Ref
    writes: Ref
    scores: Ref
    overlaps: Ref


class OperandGradients(NamedTuple):
    """Gradients of the results of `decayed_chunks`, and of beta with the delta rule."""

    decayed: DecayedChunks  # but of the inverse, whose gradient is that of the overlaps
    beta: Ref  # [B, N, HV, C] float32


class Scratch(NamedTuple):
    """Shared memory of a thread block."""

    do: Ref
    u: Ref
    dv: Ref
    state: Ref
    dstate: Ref
    # Every one of these holds several squares in turn, of pairs or of 64 channels.
    first: Ref
    second: Ref
    third: Ref
    kept: Ref
    beta: Ref
    beta_column: Ref


class Loaded(NamedTuple):
    """Barriers of loads."""

    values: Ref
    states: Ref
    third: Ref


def _scratch(plan: Plan) -> tuple[Scratch, Loaded]:
    shape, delta = plan.shape, plan.shape.delta
    tile = functools.partial(smem.tile, dtype=shape.dtype)
    values, square = tile(CHUNK, shape.value_dim), tile(*SQUARE)
    vector = plgpu.SMEM((CHUNK,), jnp.float32) if delta else None
    tiles = Scratch(
        do=values,
        u=values,
        dv=values if delta else None,
        state=tile(WIDTH, shape.value_dim),
        dstate=tile(shape.value_dim, WIDTH),
        first=square,
        second=square,
        third=square,
        kept=plgpu.SMEM((WIDTH,), jnp.float32),
        beta=vector,
        beta_column=vector,
    )
    loaded = Loaded(
        values=plgpu.Barrier(num_arrivals=5 if delta else 2),
        states=plgpu.Barrier(num_arrivals=1 + state_planes.count(shape)),
        third=plgpu.Barrier() if delta else None,
    )
    return tiles, loaded


def _settle() -> None:
    """Wait until all warps are past their products, and no store reads shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _dot_rows(x: Ref, y: Ref) -> jax.Array:
    """`rowsum(x * y)` of two tiles; small squares keep registers free."""
    parts = [(slice(None), pl.ds(i, CHUNK)) for i in range(0, x.shape[1], CHUNK)]
    products = [(smem.matrix(x.at[at]) * smem.matrix(y.at[at])).sum(axis=1) for at in parts]
    return functools.reduce(operator.add, products[1:], 0 + products[0])


def _pairs(
    plan: Plan, tiles: Scratch, loaded: Loaded, forward: Ref, out: Ref, x: jax.Array, factor: float
) -> jax.Array:
    """Store `factor * x * beta_j`; return the diagonal of `forward^T x`, or 0 if none is needed."""
    weighted = x * factor
    if plan.shape.delta:
        weighted *= smem.over_columns(smem.column(tiles.beta_column), SQUARE)
        _settle()
        plgpu.copy_gmem_to_smem(forward, tiles.third, loaded.third)
        tiles.first[...] = x.astype(plan.shape.dtype)
    tiles.second[...] = weighted.astype(plan.shape.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tiles.second, out)
    if not plan.shape.delta:
        return jnp.zeros((CHUNK,), jnp.float32)
    plgpu.barrier_wait(loaded.third)
    pair = smem.transposed(tiles.third), tiles.first
    return lanes.diagonal(mma.product(SQUARE, pair), interpret=plan.interpret)


def _body(
    plan: Plan, refs: Inputs, results: OperandGradients, tiles: Scratch, loaded: Loaded
) -> None:
    delta, out = plan.shape.delta, results.decayed
    place = unravel(lax.axis_index("program"), plan.shape.chunks, plan.shape.heads)
    batch, chunk, head = place
    tokens = pl.ds(chunk * CHUNK, CHUNK)

    def load_states(at: Index) -> None:
        channels = pl.ds(at * WIDTH, WIDTH)
        state = refs.state.at[(*place, channels)]
        plgpu.copy_gmem_to_smem(state, tiles.state, loaded.states)
        own = batch, tokens, head, channels
        state_planes.load_planes(refs.planes, own, tiles.dstate, loaded.states)

    def load_values(source: Ref, tile: Ref) -> None:
        plgpu.copy_gmem_to_smem(source.at[batch, tokens, head], tile, loaded.values)

    load_values(refs.do, tiles.do)
    load_values(refs.u, tiles.u)
    if delta:
        load_values(refs.dv, tiles.dv)
        for tile in (tiles.beta, tiles.beta_column):
            plgpu.copy_gmem_to_smem(refs.beta.at[place], tile, loaded.values)
    load_states(0)
    plgpu.barrier_wait(loaded.values)
    right = smem.transposed(tiles.u)
    pairs = functools.partial(_pairs, plan, tiles, loaded)
    y = lanes.masked(mma.product(SQUARE, (tiles.do, right)), interpret=plan.interpret)
    scores = refs.scores.at[place] if delta else None
    diagonal = pairs(scores, out.scores.at[place], y, plan.scale)
    dbeta = beta = jnp.zeros((CHUNK,), jnp.float32)
    if delta:
        x = mma.product(SQUARE, (tiles.dv, right))
        x = lanes.masked(x, operator.gt, interpret=plan.interpret)
        erased = pairs(refs.overlaps.at[place], out.overlaps.at[place], x, -1.0)
        dbeta = plan.scale * diagonal - erased
        beta = smem.row(tiles.beta)

    def step(at: Index, dbeta: jax.Array) -> jax.Array:
        channels = pl.ds(at * WIDTH, WIDTH)
        own = batch, tokens, head, channels
        _settle()
        if delta:
            plgpu.copy_gmem_to_smem(refs.writes.at[own], tiles.third, loaded.third)
        plgpu.barrier_wait(loaded.states)
        kept = state_planes.dot_rows(tiles.state, tiles.dstate, interpret=plan.interpret)
        tiles.kept[...] = plan.scale * kept
        state = smem.transposed(tiles.state)
        read = mma.product(SQUARE, (tiles.do, state))
        tiles.first[...] = (plan.scale * read).astype(plan.shape.dtype)
        if delta:
            erased = mma.product(SQUARE, (tiles.dv, state))
            tiles.second[...] = (-erased).astype(plan.shape.dtype)
        written = plan.scale * mma.product(SQUARE, (tiles.u, tiles.dstate))
        if delta:
            plgpu.barrier_wait(loaded.third)
            dbeta += (smem.matrix(tiles.third) * written).sum(axis=1)
            written *= smem.over_rows(beta, SQUARE)
            plgpu.commit_smem()
        tiles.third[...] = written.astype(plan.shape.dtype)
        plgpu.commit_smem()
        pl.when((at + 1) * WIDTH < plan.shape.key_dim)(lambda: load_states(at + 1))
        plgpu.copy_smem_to_gmem(tiles.first, out.queries.at[own])
        plgpu.copy_smem_to_gmem(tiles.third, out.writes.at[own])
        if delta:
            plgpu.copy_smem_to_gmem(tiles.second, out.keys.at[own])
        plgpu.copy_smem_to_gmem(tiles.kept, out.kept.at[(*place, channels)])
        return dbeta

    dbeta = lax.fori_loop(0, plan.shape.key_dim // WIDTH, step, dbeta)
    if delta:
        exact = _dot_rows(tiles.dv, tiles.u) / jnp.maximum(beta, SMALL_BETA)
        tiles.beta[...] = jnp.where(beta > SMALL_BETA, exact, dbeta)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tiles.beta, results.beta.at[place])
    plgpu.wait_smem_to_gmem(0)


def chunk_cotangents(
    shape: Shape,
    made: DecayedChunks,
    beta: jax.Array | None,
    u: jax.Array,
    do: jax.Array,
    dv: jax.Array,
    states: jax.Array,
    planes: tuple[jax.Array, ...],
    *,
    scale: float,
    interpret: object = None,
) -> OperandGradients:
    """Compute gradients of the results of `decayed_chunks`, and of beta.

    Args:
        shape: Sizes and variant of the call.
        made: Those results; none of them counts without the delta rule.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        u: Corrected values (the values themselves without the delta rule), `[B, T, HV, V]`.
        do: Gradient of the outputs, `[B, T, HV, V]`.
        dv: Gradient of the values, `[B, T, HV, V]`; unused without the delta rule.
        states: State entering each chunk, `[B, N, HV, K, V]`.
        planes: Gradient of the state leaving each chunk, over `scale`: the planes of
            `state_planes`, each `[B, T, HV, K]`.
        scale: Factor on `q`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The gradients.
    """
    plan = Plan(shape=shape, scale=float(scale), interpret=interpret is not None)
    types = types_of(shape, save=True)
    forward = (dv, beta, made.writes, made.scores, made.overlaps)
    dbeta = None if beta is None else jax.ShapeDtypeStruct(beta.shape, jnp.float32)
    outputs = OperandGradients(types._replace(inverse=None), dbeta)
    return launches.launch(
        "chunk_cotangents",
        functools.partial(_body, plan),
        Inputs(do, u, states, planes, *(forward if shape.delta else [None] * len(forward))),
        outputs,
        *_scratch(plan),
        programs=shape.batch * shape.chunks * shape.heads,
        interpret=interpret,
    )
