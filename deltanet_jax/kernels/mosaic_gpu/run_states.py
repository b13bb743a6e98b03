"""Outputs and states, chunk after chunk; heads and columns of V in parallel.

Rows of one chunk, `S` its incoming state, `T` its inverse::

    u = T (v - exp(b) k S)                 without the delta rule: u = v, and beta is 1
    o = scale * (exp(b) q S + tril(D * (q k^T)) (beta u))
    S = exp(b_C) S + k^T (exp(b_C - b) beta u)

Everything is computed transposed: `S^T`, `u^T` and `o^T` have one column of V to a row, so that
each of them is the left operand of the next product straight from registers, and the warps of a
warpgroup never wait for one another between the loads and the stores of a chunk.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import program, run_states_fused
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, mma, smem
from deltanet_jax.kernels.mosaic_gpu.program import WIDTH, Plan
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["run_states", "state_maps"]

SHAPE = (WIDTH, CHUNK)  # of everything that has a row for each column of V


def _over_tokens(tile, name: str) -> jax.Array:
    """A vector of the chunk, at every column of V."""
    return smem.over_columns(smem.column(tile[name]), SHAPE)


def _values(plan: Plan, tile, place) -> jax.Array:
    values = smem.load_transposed(tile["v"], interpret=plan.interpret)
    if plan.map_dim:
        # Of the columns that carry the map, the values are zero.
        values *= jnp.where(place[2].start < plan.shape.value_dim, 1.0, 0.0)
    return values


def _read(plan: Plan, tile, state, names) -> dict[str, jax.Array]:
    """`exp(b) S^T x^T` of the keys and of the queries; both read one 16-bit copy of a block."""
    if not names:
        return {}
    total = [jnp.zeros(SHAPE, jnp.float32) for _ in names]
    for block, keys in zip(state, plan.key_blocks, strict=True):
        low = block.astype(plan.shape.dtype)
        pairs = [[(low, smem.transposed(tile[x].at[:, keys]))] for x in names]
        total = mma.accumulate(*zip(total, pairs, strict=True), interpret=plan.interpret)
    if plan.shape.scalar_gate:
        total = [x * _over_tokens(tile, "decay") for x in total]
    return dict(zip(names, total, strict=True))


def _times_inverse(plan: Plan, tile, error: jax.Array) -> list:
    """List the products of `error T^T`; `T` is one tile, or two of half of its columns each."""
    if plan.precise:
        parts = lanes.halves(error, interpret=plan.interpret)
        return [(part, smem.transposed(tile["inverse"])) for part in parts]
    error = error.astype(plan.shape.dtype)
    if not isinstance(tile["inverse"], tuple):
        return [(error, smem.transposed(tile["inverse"]))]
    middle = CHUNK // 2
    parts = error[:, :middle], error[:, middle:]
    halves = (smem.transposed(half) for half in tile["inverse"])
    return list(zip(parts, halves, strict=True))


def _chunk(plan: Plan, tile, turns, chunk, place, state):
    """Walk one chunk; return the state after it, and `o^T` over `scale`."""
    # At K = 64, where two programs share a multiprocessor, registers hold one reading at a time.
    early = plan.shape.key_dim > 64 and not plan.only_state
    read = _read(plan, tile, state, ("k",) * plan.shape.delta + ("q",) * early)
    write = u = _values(plan, tile, place)
    if plan.shape.delta:
        error = u - read["k"]
        turns.wait_inverse(chunk)
        u = mma.product(SHAPE, *_times_inverse(plan, tile, error), interpret=plan.interpret)
        if early:
            turns.free_inverse(chunk)
        write = u * _over_tokens(tile, "beta")
    steps = []
    if not plan.only_state:
        # The stores of the chunk before have read their tiles.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        turns.stored(chunk)
        if plan.save and plan.shape.delta:
            _keep(plan, tile["u"], u)
        if not early:
            read |= _read(plan, tile, state, ("q",))
            turns.free_inverse(chunk)
        turns.wait_scores(chunk)
        pair = write.astype(plan.shape.dtype), smem.transposed(tile["scores"])
        steps = [(read["q"], [pair])]
    if plan.shape.scalar_gate:
        write *= _over_tokens(tile, "rest")
    state = _decayed(plan, tile, state)
    added = write.astype(plan.shape.dtype)
    for block, keys in zip(state, plan.key_blocks, strict=True):
        steps += [(block, [(added, tile[plan.writes].at[:, keys])])]
    done = mma.accumulate(*steps, interpret=plan.interpret)
    turns.free(chunk)
    return done[-len(state) :], None if plan.only_state else done[0]


def _decayed(plan: Plan, tile, state: list) -> list:
    """Multiply the blocks of the state by the decay over the chunk."""
    if plan.shape.vector_gate:
        kept = [smem.column(tile["kept"].at[keys]) for keys in plan.key_blocks]
        return [x * smem.over_columns(y, x.shape) for x, y in zip(state, kept, strict=True)]
    if plan.shape.scalar_gate:
        kept = tile["decay"][CHUNK - 1]
        return [x * kept for x in state]
    return state


def _keep(plan: Plan, tile, x: jax.Array) -> None:
    smem.store_transposed(tile, x.astype(plan.shape.dtype), interpret=plan.interpret)


def _walk(plan: Plan, refs, own, turns, batch, head, columns):
    """Walk the chunks of one warpgroup's columns."""
    place = batch, head, columns

    def keep_state(state):
        for block, keys in zip(state, plan.key_blocks, strict=True):
            _keep(plan, own()["state"].at[keys], block)

    def save_state(chunk):
        target = refs["states"].at[batch, lax.div(chunk, plan.stride), head, :, columns]
        plgpu.copy_smem_to_gmem(own()["state"], target)

    def step(chunk, state):
        tile = turns.wait(chunk)
        state, o = _chunk(plan, tile, turns, chunk, place, list(state))
        if plan.only_state:
            return state
        tokens = (batch, pl.ds(chunk * CHUNK, CHUNK), head, columns)
        _keep(plan, tile["o"], o * plan.scale)
        kept = jnp.logical_and(chunk + 1 < plan.shape.chunks, lax.rem(chunk + 1, plan.stride) == 0)
        if plan.save:
            pl.when(kept)(lambda: keep_state(state))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile["o"], refs["o"].at[tokens])
        if plan.save:
            pl.when(kept)(lambda: save_state(chunk + 1))
            if plan.shape.delta:
                plgpu.copy_smem_to_gmem(tile["u"], refs["u"].at[tokens])
        return state

    places = [(batch, head, keys, columns) for keys in plan.key_blocks]
    if "start" in refs:
        # That of a map is the same for every head.
        starts = [place[2:] for place in places] if plan.map_dim else places
        start = [refs["start"].at[place] for place in starts]
        state = [smem.load_f32_transposed(x, interpret=plan.interpret) for x in start]
    else:
        state = [smem.zeros((WIDTH, keys.size)) for keys in plan.key_blocks]
    if plan.save:
        keep_state(state)
        plgpu.commit_smem()
        save_state(0)
    state = lax.fori_loop(0, plan.shape.chunks, step, state)
    for at, block in zip(places, state, strict=True):
        smem.store_f32_transposed(refs["final"].at[at], block, interpret=plan.interpret)
    plgpu.wait_smem_to_gmem(0)


def run_states(
    shape: Shape, q, k, v, inverse, state, *,
    beta, b, exponentials, channels=None, scale, save, interpret=None,
):  # fmt: skip
    """Compute outputs, the final state and the residuals.

    Args:
        shape: Sizes and variant of the call.
        q: `[B, T, H, K]` with T a multiple of 64.
        k: The same shape.
        v: `[B, T, HV, V]`.
        inverse: `[B, N, HV, C, C]`; `None` without the delta rule, and where
            `run_states_fused.covers`.
        state: The initial state, `[B, HV, K, V]` float32, or `None` for zeros.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        b: In-chunk cumulative log-decay of a scalar gate, `[B, N, HV, C]` float32, or `None`.
        exponentials: `decay` and `rest` of `gate_vectors` by name; with `b`.
        channels: With a vector gate, `writes`, `scores` and `kept` of `decayed_chunks`;
            `q` and `k` then are its `queries` and `keys`.
        scale: Factor on `q`.
        save: Whether to return `states` and `u`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        A dictionary: `o` `[B, T, HV, V]`, `final` `[B, HV, K, V]` float32 and, if saved, the
        `states` entering every `state_planes.stride`-th chunk `[B, N', HV, K, V]` and (delta rule)
        `u` `[B, T, HV, V]`.
    """
    vectors = program.vectors_of(beta, b, exponentials)
    plan = Plan(shape=shape, scale=float(scale), save=save, interpret=interpret is not None)
    own = {"o": SHAPE}
    array = jax.ShapeDtypeStruct
    state_shape = (shape.heads, shape.key_dim, shape.value_dim)
    outputs = {"o": array(v.shape, v.dtype)}
    outputs |= {"final": array((shape.batch, *state_shape), jnp.float32)}
    if save:
        runs = -(-shape.chunks // plan.stride)
        outputs |= {"states": array((shape.batch, runs, *state_shape), v.dtype)}
        own |= {"state": (shape.key_dim, WIDTH)}
        if shape.delta:
            own |= {"u": SHAPE}
            outputs |= {"u": array(v.shape, v.dtype)}
    inputs = {"v": v} | program.inputs_of(q, k, inverse, vectors, channels)
    if state is not None:
        inputs |= {"start": state}
    if shape.delta and inverse is None:
        return run_states_fused.launch(
            "run_states", plan, _walk, inputs, outputs, interpret=interpret
        )
    return program.launch(
        "run_states", plan, _walk, inputs, outputs, own,
        values="v", barriers=False, interpret=interpret,
    )  # fmt: skip


def state_maps(
    shape: Shape, k, v, inverse, *, beta, b, exponentials, channels=None, interpret=None
):
    """The affine map of the state over all of `T`: `S_T = M S_0 + R`.

    Args:
        shape: Sizes and variant of the call.
        k: `[B, T, H, K]` with T a multiple of 64.
        v: `[B, T, HV, V]`.
        inverse: `[B, N, HV, C, C]`, or `None` without the delta rule.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        b: In-chunk cumulative log-decay of a scalar gate, `[B, N, HV, C]` float32, or `None`.
        exponentials: `decay` and `rest` of `gate_vectors` by name; with `b`.
        channels: With a vector gate, `writes`, `scores` and `kept` of `decayed_chunks`;
            `q` and `k` then are its `queries` and `keys`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `M` `[B, HV, K, K]`, and `[B, HV, K, V + K]` that begins with the columns of `R`; a kernel
        reads them there without a copy. Both float32.
    """
    key_dim, value_dim = shape.key_dim, shape.value_dim
    vectors = program.vectors_of(beta, b, exponentials)
    plan = Plan(shape=shape, map_dim=key_dim, only_state=True, interpret=interpret is not None)
    # R from a state of zeros, M as what becomes of the unit vectors when nothing is written.
    start = jnp.eye(key_dim, key_dim + value_dim, k=value_dim, dtype=jnp.float32)
    inputs = {"v": v, "start": start} | program.inputs_of(None, k, inverse, vectors, channels)
    own = {}
    outputs = {"final": jax.ShapeDtypeStruct((shape.batch, shape.heads, *start.shape), jnp.float32)}
    final = program.launch(
        "state_maps", plan, _walk, inputs, outputs, own,
        values="v", barriers=False, interpret=interpret,
    )["final"]  # fmt: skip
    return final[..., value_dim:], final
