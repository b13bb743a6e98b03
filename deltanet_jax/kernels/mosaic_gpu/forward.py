"""Outputs and states, chunk after chunk; heads and columns of V in parallel.

Rows of one chunk, `S` its incoming state in float32 registers, `T` its inverse::

    u = T (v - exp(b) k S)                 without the delta rule: u = v, and beta is 1
    o = scale * (exp(b) q S + tril(D * (q k^T)) (beta u))
    S = exp(b_C) S + k^T (exp(b_C - b) beta u)
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import serial, tiles
from deltanet_jax.kernels.mosaic_gpu.serial import WIDTH, Plan

__all__ = ["run_states", "state_maps"]

CHUNK = tiles.CHUNK
SHAPE = (CHUNK, WIDTH)


def _correct(plan: Plan, tile, place, decay):
    """`u` and `beta u` in registers."""
    u = tiles.matrix(tile["v"])
    if plan.map_dim:
        # Of the columns that carry the map, the values are zero.
        u *= jnp.where(place[2].start < plan.value_dim, 1.0, 0.0)
    if not plan.delta:
        return u, u
    read = tiles.product(SHAPE, (tile["k"], tile["state"]))
    if plan.gated:
        read *= tiles.over_rows(decay, SHAPE)
    tile["error"][...] = (u - read).astype(plan.dtype)
    plgpu.commit_smem()
    u = tiles.product(SHAPE, (tile["inverse"], tile["error"]))
    return u, u * tiles.over_rows(tiles.row(tile["beta"]), SHAPE)


def _store_writes(plan: Plan, refs, tile, tokens, u, write, decayed) -> None:
    """Fills the tiles that the last products read, and saves `u`."""
    _settle()
    if not plan.only_state:
        tile["write"][...] = write.astype(plan.dtype)
    if "added" in tile or plan.only_state:
        tile.get("added", tile["write"])[...] = decayed.astype(plan.dtype)
    save = plan.save and plan.delta
    if save:
        tile["error"][...] = u.astype(plan.dtype)
    plgpu.commit_smem()
    if save:
        plgpu.copy_smem_to_gmem(tile["error"], refs["u"].at[tokens])


def _chunk(plan: Plan, refs, tile, barriers, chunk, place, state):
    """One chunk; returns the state after it, and the outputs over `scale`."""
    _, wait_scores, free = barriers
    batch, head, columns = place
    tokens = (batch, pl.ds(chunk * CHUNK, CHUNK), head, columns)
    b = decay = None
    if plan.gated:
        b = tiles.row(tile["b"])
        decay = jnp.exp(b)
    u, write = _correct(plan, tile, place, decay)
    decayed = write
    if plan.gated:
        total = tiles.row(tile["total"])
        decayed = write * tiles.over_rows(jnp.exp(total - b), SHAPE)
    state = serial.decayed_state(plan, tile, state)
    _store_writes(plan, refs, tile, tokens, u, write, decayed)
    last = []
    if not plan.only_state:
        pairs = [(tile["q"], tile["state"]), (tile["scores"], tile["write"])]
        o = jnp.zeros(SHAPE, jnp.float32)
        if plan.gated:
            o = tiles.product(SHAPE, pairs.pop(0)) * tiles.over_rows(decay, SHAPE)
        wait_scores(chunk)
        last = [(o, pairs)]
    accumulate = functools.partial(tiles.accumulate, interpret=plan.interpret)
    if plan.gated and "added" not in tile and not plan.only_state:
        # Shared memory is full at K = 256: the second use of one tile.
        (o,), last = accumulate(*last), []
        _settle()
        tile["write"][...] = decayed.astype(plan.dtype)
        plgpu.commit_smem()
    added = tile.get("added", tile["write"])
    keys = [tiles.transposed(tile[plan.writes].at[:, rows]) for rows in plan.rows]
    last += [(block, [(key, added)]) for block, key in zip(state, keys, strict=True)]
    done = accumulate(*last)
    free(chunk)
    if plan.only_state:
        return done, None
    return done[-len(state) :], done[0] if len(done) > len(state) else o


def _settle() -> None:
    """All warps are past their products, and no store reads shared memory any more."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _walk(plan: Plan, refs, own, barriers, batch, head, columns):
    """The chunks of one warpgroup's columns.

    A tile is filled again only after `_settle` or `commit_smem` has held all warps since its
    last use, so the compiler adds no barriers of its own.
    """
    place = batch, head, columns

    def keep(state):
        for rows, block in zip(plan.rows, state, strict=True):
            own["state"].at[rows][...] = block.astype(plan.dtype)

    def save(chunk):
        target = refs["states"].at[batch, chunk, head, :, columns]
        plgpu.copy_smem_to_gmem(own["state"], target)

    def step(chunk, state):
        tile = barriers[0](chunk)
        state, o = _chunk(plan, refs, tile, barriers, chunk, place, list(state))
        _settle()
        keep(state)
        if o is not None:
            own["write"][...] = (o * plan.scale).astype(plan.dtype)
        plgpu.commit_smem()
        if o is not None:
            tokens = (batch, pl.ds(chunk * CHUNK, CHUNK), head, columns)
            plgpu.copy_smem_to_gmem(own["write"], refs["o"].at[tokens])
        if plan.save:
            pl.when(chunk + 1 < plan.chunks)(lambda: save(chunk + 1))
        return state

    places = [(batch, head, rows, columns) for rows in plan.rows]
    state = [tiles.load_f32(refs["start"].at[place]) for place in places]
    keep(state)
    plgpu.commit_smem()
    if plan.save:
        save(0)
    state = lax.fori_loop(0, plan.chunks, step, state)
    for place, block in zip(places, state, strict=True):
        refs["final"].at[place][...] = block
    plgpu.wait_smem_to_gmem(0)


def run_states(q, k, v, inverse, state, *, beta, b, channels=None, scale, save, interpret=None):
    """Outputs, the final state and what the backward needs.

    Args:
        q: `[B, T, H, K]` with T a multiple of 64.
        k: The same shape.
        v: `[B, T, HV, V]`.
        inverse: `[B, N, HV, C, C]`, or `None` without the delta rule.
        state: The initial state, `[B, HV, K, V]` float32.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        b: In-chunk cumulative log-decay of one gate per head, `[B, N, HV, C]` float32, or `None`.
        channels: With a gate per key channel, `writes`, `scores` and `kept` of `decayed_chunks`;
            `q` and `k` then are its `queries` and `keys`.
        scale: Factor on `q`.
        save: Whether to return `states` and `u`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        A dictionary: `o` `[B, T, HV, V]`, `final` `[B, HV, K, V]` float32 and, if saved, the
        `states` entering each chunk `[B, N, HV, K, V]` and (delta rule) `u` `[B, T, HV, V]`.
    """
    plan = serial.plan_for(q, v, beta, b, channels, scale=scale, save=save, interpret=interpret)
    own = {"state": (plan.key_dim, WIDTH), "write": SHAPE}
    if plan.delta:
        own |= {"error": SHAPE}
    if plan.gated and plan.key_dim <= 128:
        own |= {"added": SHAPE}
    shape = jax.ShapeDtypeStruct
    outputs = {"o": shape(v.shape, v.dtype), "final": shape(state.shape, jnp.float32)}
    if save:
        chunks = (plan.batch, plan.chunks, plan.heads, plan.key_dim, plan.value_dim)
        outputs |= {"states": shape(chunks, v.dtype)}
        if plan.delta:
            outputs |= {"u": shape(v.shape, v.dtype)}
    inputs = {"v": v, "start": state} | serial.inputs_of(q, k, inverse, beta, b, channels)
    return serial.launch(
        "run_states", plan, _walk, inputs, outputs, own,
        values="v", reverse=False, barriers=False, interpret=interpret,
    )  # fmt: skip


def state_maps(k, v, inverse, *, beta, b, channels=None, interpret=None):
    """The affine map of the state over all of `T`: `S_T = M S_0 + R`.

    Args:
        k: `[B, T, H, K]` with T a multiple of 64.
        v: `[B, T, HV, V]`.
        inverse: `[B, N, HV, C, C]`, or `None` without the delta rule.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        b: In-chunk cumulative log-decay of one gate per head, `[B, N, HV, C]` float32, or `None`.
        channels: With a gate per key channel, `writes`, `scores` and `kept` of `decayed_chunks`;
            `q` and `k` then are its `queries` and `keys`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `M` `[B, HV, K, K]` and `R` `[B, HV, K, V]`, float32.
    """
    heads, value_dim = v.shape[2:]
    writes = k if channels is None else channels["writes"]
    batch, _, _, key_dim = writes.shape
    plan = serial.plan_for(
        writes, v, beta, b, channels,
        scale=1.0, interpret=interpret, map_dim=key_dim, only_state=True,
    )  # fmt: skip
    # R from a state of zeros, M as what becomes of the unit vectors when nothing is written.
    start = jnp.eye(key_dim, key_dim + value_dim, k=value_dim, dtype=jnp.float32)
    start = jnp.broadcast_to(start, (batch, heads, *start.shape))
    inputs = {"v": v, "start": start} | serial.inputs_of(None, k, inverse, beta, b, channels)
    own = {"state": (plan.key_dim, WIDTH), "write": SHAPE}
    if plan.delta:
        own |= {"error": SHAPE}
    outputs = {"final": jax.ShapeDtypeStruct(start.shape, jnp.float32)}
    final = serial.launch(
        "state_maps", plan, _walk, inputs, outputs, own,
        values="v", reverse=False, barriers=False, interpret=interpret,
    )["final"]  # fmt: skip
    return final[..., value_dim:], final[..., :value_dim]
