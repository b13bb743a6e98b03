"""Outputs and states, chunk after chunk; heads and columns of V in parallel.

Rows of one chunk, `S` its incoming state, `T` its inverse::

    u = T (v - exp(b) k S)                 without the delta rule: u = v, and beta is 1
    o = scale * (exp(b) q S + tril(D * (q k^T)) (beta u))
    S = exp(b_C) S + k^T (exp(b_C - b) beta u)

Everything is computed transposed: `S^T`, `u^T` and `o^T` have one column of V to a row, so that
each of them is the left operand of the next product straight from registers, and the warps of a
warpgroup never wait for one another between the loads and the stores of a chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import program, run_states_fused
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, mma, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.program import WIDTH, Inputs, Own, Pipeline, Place, Plan
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["States", "run_states", "state_maps"]

SHAPE = (WIDTH, CHUNK)  # of everything that has a row for each column of V


class States(NamedTuple):
    """Results of `run_states`; `state_maps` has the final state alone."""

    o: Ref = None  # [B, T, HV, V]
    final: Ref = None  # [B, HV, K, V] float32
    states: Ref = None  # entering every `state_planes.stride`-th chunk, [B, N', HV, K, V]
    u: Ref = None  # [B, T, HV, V]; with the delta rule


def _over_tokens(vector: Ref) -> jax.Array:
    """A vector of the chunk, at every column of V."""
    return smem.over_columns(smem.column(vector), SHAPE)


def _values(plan: Plan, v: Ref, place: Place) -> jax.Array:
    values = smem.load_transposed(v, interpret=plan.interpret)
    if plan.map_dim:
        # Of the columns that carry the map, the values are zero.
        values *= jnp.where(place.columns.start < plan.shape.value_dim, 1.0, 0.0)
    return values


def _read(plan: Plan, decay: Ref, state: list[jax.Array], *tiles: Ref) -> list[jax.Array]:
    """`exp(b) S^T x^T` of the keys or queries; all of them read one 16-bit copy of a block."""
    if not tiles:
        return []
    total = [jnp.zeros(SHAPE, jnp.float32) for _ in tiles]
    for block, keys in zip(state, plan.key_blocks, strict=True):
        low = block.astype(plan.shape.dtype)
        pairs = [[(low, smem.transposed(x.at[:, keys]))] for x in tiles]
        total = mma.accumulate(*zip(total, pairs, strict=True), interpret=plan.interpret)
    if plan.shape.scalar_gate:
        total = [x * _over_tokens(decay) for x in total]
    return total


def _times_inverse(
    plan: Plan, inverse: Ref | tuple[Ref, Ref], error: jax.Array
) -> list[tuple[jax.Array, Ref]]:
    """List the products of `error T^T`; `T` is one tile, or two of half of its columns each."""
    if plan.precise:
        parts = lanes.halves(error, interpret=plan.interpret)
        return [(part, smem.transposed(inverse)) for part in parts]
    error = error.astype(plan.shape.dtype)
    if not isinstance(inverse, tuple):
        return [(error, smem.transposed(inverse))]
    middle = CHUNK // 2
    parts = error[:, :middle], error[:, middle:]
    return list(zip(parts, map(smem.transposed, inverse), strict=True))


def _chunk(
    plan: Plan,
    tile: Inputs,
    own: Own,
    pipeline: Pipeline,
    chunk: Index,
    place: Place,
    state: list[jax.Array],
) -> tuple[list[jax.Array], jax.Array | None]:
    """Walk one chunk; return the state after it, and `o^T` over `scale`."""
    # At K = 64, where two programs share a multiprocessor, registers hold one reading at a time.
    early = plan.shape.key_dim > 64 and not plan.only_state
    reads = [tile.k] * plan.shape.delta + [tile.q] * early
    read = _read(plan, tile.decay, state, *reads)
    write = u = _values(plan, tile.v, place)
    if plan.shape.delta:
        error = u - read.pop(0)
        pipeline.wait_inverse(chunk)
        products = _times_inverse(plan, tile.inverse, error)
        u = mma.product(SHAPE, *products, interpret=plan.interpret)
        if early:
            pipeline.release_inverse(chunk)
        write = u * _over_tokens(tile.beta)
    steps: list[tuple[jax.Array, list[tuple[jax.Array, Ref]]]] = []
    if not plan.only_state:
        # The stores of the chunk before have read their tiles.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pipeline.stored(chunk)
        if plan.save and plan.shape.delta:
            _keep(plan, own.u, u)
        if not early:
            read = _read(plan, tile.decay, state, tile.q)
            pipeline.release_inverse(chunk)
        pipeline.wait_scores(chunk)
        pair = write.astype(plan.shape.dtype), smem.transposed(tile.scores)
        (queries,) = read
        steps = [(queries, [pair])]
    if plan.shape.scalar_gate:
        write *= _over_tokens(tile.rest)
    state = _decayed(plan, tile, state)
    added = write.astype(plan.shape.dtype)
    for block, keys in zip(state, plan.key_blocks, strict=True):
        steps += [(block, [(added, tile.writing.at[:, keys])])]
    done = mma.accumulate(*steps, interpret=plan.interpret)
    pipeline.release(chunk)
    return done[-len(state) :], None if plan.only_state else done[0]


def _decayed(plan: Plan, tile: Inputs, state: list[jax.Array]) -> list[jax.Array]:
    """Multiply the blocks of the state by the decay over the chunk."""
    if plan.shape.vector_gate:
        kept = [smem.column(tile.kept.at[keys]) for keys in plan.key_blocks]
        return [x * smem.over_columns(y, x.shape) for x, y in zip(state, kept, strict=True)]
    if plan.shape.scalar_gate:
        total = tile.decay[CHUNK - 1]
        return [x * total for x in state]
    return state


def _keep(plan: Plan, tile: Ref, x: jax.Array) -> None:
    smem.store_transposed(tile, x.astype(plan.shape.dtype), interpret=plan.interpret)


def _walk(
    plan: Plan, refs: Inputs, out: States, own: Callable[[], Own], pipeline: Pipeline, place: Place
) -> None:
    """Walk the chunks of one warpgroup's columns."""
    batch, head, columns = place

    def keep_state(state: list[jax.Array]) -> None:
        for block, keys in zip(state, plan.key_blocks, strict=True):
            _keep(plan, own().state.at[keys], block)

    def save_state(chunk: Index) -> None:
        target = out.states.at[batch, lax.div(chunk, plan.stride), head, :, columns]
        plgpu.copy_smem_to_gmem(own().state, target)

    def step(chunk: Index, state: list[jax.Array]) -> list[jax.Array]:
        tile, tiles = pipeline.wait(chunk)
        state, o = _chunk(plan, tile, tiles, pipeline, chunk, place, list(state))
        if o is None:
            return state
        tokens = (batch, pl.ds(chunk * CHUNK, CHUNK), head, columns)
        _keep(plan, tiles.o, o * plan.scale)
        kept = jnp.logical_and(chunk + 1 < plan.shape.chunks, lax.rem(chunk + 1, plan.stride) == 0)
        if plan.save:
            pl.when(kept)(lambda: keep_state(state))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tiles.o, out.o.at[tokens])
        if plan.save:
            pl.when(kept)(lambda: save_state(chunk + 1))
            if plan.shape.delta:
                plgpu.copy_smem_to_gmem(tiles.u, out.u.at[tokens])
        return state

    places = [(batch, head, keys, columns) for keys in plan.key_blocks]
    if refs.state is not None:
        # That of a map is the same for every head.
        starts = [refs.state.at[at[2:] if plan.map_dim else at] for at in places]
        state = [smem.load_f32_transposed(x, interpret=plan.interpret) for x in starts]
    else:
        state = [smem.zeros((WIDTH, keys.size)) for keys in plan.key_blocks]
    if plan.save:
        keep_state(state)
        plgpu.commit_smem()
        save_state(0)
    state = lax.fori_loop(0, plan.shape.chunks, step, state)
    for at, block in zip(places, state, strict=True):
        smem.store_f32_transposed(out.final.at[at], block, interpret=plan.interpret)
    plgpu.wait_smem_to_gmem(0)


def run_states(
    shape: Shape,
    inputs: Inputs,
    v: jax.Array,
    state: jax.Array | None,
    *,
    scale: float,
    save: bool,
    interpret: object = None,
) -> States:
    """Compute outputs, the final state and the residuals.

    Args:
        shape: Sizes and variant of the call.
        inputs: Keys, queries, gates and inverses; with the delta rule the inverse is `None` where
            `run_states_fused.covers`.
        v: `[B, T, HV, V]` with T a multiple of 64.
        state: The initial state, `[B, HV, K, V]` float32, or `None` for zeros.
        scale: Factor on `q`.
        save: Whether to return `states` and `u`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The results.
    """
    plan = Plan(shape=shape, scale=float(scale), save=save, interpret=interpret is not None)
    inputs = inputs._replace(v=v, b_column=inputs.b, state=state)
    corrected = save and shape.delta
    array, square = jax.ShapeDtypeStruct, (shape.heads, shape.key_dim, shape.value_dim)
    values = array(v.shape, v.dtype)
    runs = -(-shape.chunks // plan.stride)
    outputs = States(
        o=values,
        final=array((shape.batch, *square), jnp.float32),
        states=array((shape.batch, runs, *square), v.dtype) if save else None,
        u=values if corrected else None,
    )
    if shape.delta and inputs.inverse is None:
        return run_states_fused.launch(
            "run_states", plan, _walk, inputs, outputs, interpret=interpret
        )
    own = Own(
        o=plan.own_tile(*SHAPE),
        state=plan.own_tile(shape.key_dim, WIDTH) if save else None,
        u=plan.own_tile(*SHAPE) if corrected else None,
    )
    return program.launch(
        "run_states", plan, _walk, inputs, outputs, own,
        automatic_barriers=False, interpret=interpret,
    )  # fmt: skip


def state_maps(
    shape: Shape, inputs: Inputs, v: jax.Array, *, interpret: object = None
) -> tuple[jax.Array, jax.Array]:
    """The affine map of the state over all of `T`: `S_T = M S_0 + R`.

    Args:
        shape: Sizes and variant of the call.
        inputs: Keys, gates and inverses.
        v: `[B, T, HV, V]` with T a multiple of 64.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `M` `[B, HV, K, K]`, and `[B, HV, K, V + K]` that begins with the columns of `R`; a kernel
        reads them there without a copy. Both float32.
    """
    key_dim, value_dim = shape.key_dim, shape.value_dim
    plan = Plan(shape=shape, map_dim=key_dim, only_state=True, interpret=interpret is not None)
    # R from a state of zeros, M as what becomes of the unit vectors when nothing is written.
    start = jnp.eye(key_dim, key_dim + value_dim, k=value_dim, dtype=jnp.float32)
    final = jax.ShapeDtypeStruct((shape.batch, shape.heads, *start.shape), jnp.float32)
    inputs = inputs._replace(v=v, q=None, b_column=inputs.b, state=start)
    final = program.launch(
        "state_maps", plan, _walk, inputs, States(final=final), Own(),
        automatic_barriers=False, interpret=interpret,
    ).final  # fmt: skip
    return final[..., value_dim:], final
