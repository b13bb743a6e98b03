"""Outputs and states, chunk after chunk; heads and columns of V in parallel.

Rows of one chunk, `S` its incoming state in float32 registers, `T` its inverse::

    u = T (v - exp(b) k S)                 without the delta rule: u = v, and beta is 1
    o = scale * (exp(b) q S + tril(D * (q k^T)) (beta u))
    S = exp(b_C) S + k^T (exp(b_C - b) beta u)
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import serial, tiles
from deltanet_jax.kernels.mosaic_gpu.serial import WIDTH, Plan

__all__ = ["run_states"]

CHUNK = tiles.CHUNK
SHAPE = (CHUNK, WIDTH)


def _correct(plan: Plan, tile, decay):
    """`u` and `beta u` in registers."""
    u = serial.matrix(tile["v"])
    if not plan.delta:
        return u, u
    read = tiles.product(SHAPE, (tile["k"], tile["state"]))
    if plan.gated:
        read *= tiles.over_rows(decay, SHAPE)
    tile["error"][...] = (u - read).astype(plan.dtype)
    plgpu.commit_smem()
    u = tiles.product(SHAPE, (tile["inverse"], tile["error"]))
    return u, u * tiles.over_rows(tiles.row(tile["beta"]), SHAPE)


def _chunk(plan: Plan, refs, tile, free, chunk, place, state):
    """One chunk; returns the state after it."""
    batch, head, columns = place
    tokens = (batch, pl.ds(chunk * CHUNK, CHUNK), head, columns)
    decay = None
    if plan.gated:
        b, total = tiles.row(tile["b"]), tiles.row(tile["total"])
        decay = jnp.exp(b)
    u, write = _correct(plan, tile, decay)
    tile["scores"][...] = tiles.scores(plan, tile).astype(plan.dtype)
    tile["write"][...] = write.astype(plan.dtype)
    if plan.gated:
        decayed = (write * tiles.over_rows(jnp.exp(total - b), SHAPE)).astype(plan.dtype)
        if "decayed" in tile:
            tile["decayed"][...] = decayed
    save = plan.save and plan.delta
    if save:
        tile["error"][...] = u.astype(plan.dtype)
    plgpu.commit_smem()
    if save:
        plgpu.copy_smem_to_gmem(tile["error"], refs["u"].at[tokens])
    o = tiles.product(SHAPE, (tile["q"], tile["state"]))
    if plan.gated:
        o *= tiles.over_rows(decay, SHAPE)
        kept = tiles.over_rows(jnp.exp(total), SHAPE)
        state = [block * kept for block in state]
    values = tile["scores"], tile["write"]
    o = tiles.product(SHAPE, values, init=o, interpret=plan.interpret)
    if plan.gated and "decayed" not in tile:
        # Shared memory is full at K = 256: the second use of one tile.
        tile["write"][...] = decayed
        plgpu.commit_smem()
    added = tile.get("decayed", tile["write"])
    for i, rows in enumerate(plan.rows):
        pair = tiles.transposed(tile["k"].at[:, rows]), added
        state[i] = tiles.product(SHAPE, pair, init=state[i], interpret=plan.interpret)
    free(chunk)
    tile["scores"][...] = (o * plan.scale).astype(plan.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile["scores"], refs["o"].at[tokens])
    return state


def _walk(plan: Plan, refs, own, wait, free, batch, head, columns):
    """The chunks of one warpgroup's columns."""

    def step(chunk, state):
        # The stores of the chunk before read the tiles that this one fills.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for rows, block in zip(plan.rows, state, strict=True):
            own["state"].at[rows][...] = block.astype(plan.dtype)
        plgpu.commit_smem()
        if plan.save:
            target = refs["states"].at[batch, chunk, head, :, columns]
            plgpu.copy_smem_to_gmem(own["state"], target)
        tile = wait(chunk)
        return _chunk(plan, refs, tile, free, chunk, (batch, head, columns), list(state))

    places = [(batch, head, rows, columns) for rows in plan.rows]
    state = [tiles.load_f32(refs["start"].at[place]) for place in places]
    state = lax.fori_loop(0, plan.chunks, step, state)
    for place, block in zip(places, state, strict=True):
        refs["final"].at[place][...] = block
    plgpu.wait_smem_to_gmem(0)


def run_states(q, k, v, inverse, state, *, beta, b, scale, save, interpret=None):
    """Outputs, the final state and what the backward needs.

    Args:
        q, k: `[B, T, H, K]` with T a multiple of 64.
        v: `[B, T, HV, V]`.
        inverse: `[B, N, HV, C, C]`, or `None` without the delta rule.
        state: The initial state, `[B, HV, K, V]` float32.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        b: In-chunk cumulative log-decay, `[B, N, HV, C]` float32, or `None` without a gate.
        scale: Factor on `q`.
        save: Whether to return `states` and `u`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        A dictionary: `o` `[B, T, HV, V]`, `final` `[B, HV, K, V]` float32 and, if saved, the
        `states` entering each chunk `[B, N, HV, K, V]` and (delta rule) `u` `[B, T, HV, V]`.
    """
    plan = serial.plan_for(q, v, beta, b, scale=scale, save=save, interpret=interpret)
    inputs = dict(q=q, k=k, v=v, start=state) | serial.vectors_of(beta, b)
    own = dict(state=(plan.key_dim, WIDTH), scores=(CHUNK, CHUNK), write=SHAPE)
    if plan.delta:
        inputs |= dict(inverse=inverse)
        own |= dict(error=SHAPE)
    if plan.gated and plan.key_dim <= 128:
        own |= dict(decayed=SHAPE)
    shape = jax.ShapeDtypeStruct
    outputs = dict(o=shape(v.shape, v.dtype), final=shape(state.shape, jnp.float32))
    if save:
        chunks = (plan.batch, plan.chunks, plan.heads, plan.key_dim, plan.value_dim)
        outputs |= dict(states=shape(chunks, v.dtype))
        if plan.delta:
            outputs |= dict(u=shape(v.shape, v.dtype))
    return serial.launch(
        "run_states", plan, _walk, inputs, outputs, own,
        values="v", reverse=False, interpret=interpret,
    )  # fmt: skip
