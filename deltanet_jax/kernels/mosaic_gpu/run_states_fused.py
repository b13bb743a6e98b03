"""Outputs and states in one kernel with the inverses, where heads fill the SMs.

Beside the two consumer warpgroups, two producers prepare the scores and the inverses of the chunks
ahead. At K = V = 128 a thread block has one head: consumers have half of its columns each,
producers the even and the odd chunks. At 64 it has two heads, and a warpgroup of each kind for
each. `k`, `q`, `v` are read once for a value head, and no inverse leaves its SM.

Chunks are numbered in the order of preparation: at 64 the heads alternate.

Stages of shared memory: the inverse of chunk `i`, and `q`, take the stage of chunk `i - 2` once
that inverse was applied. The scores take it once chunk `i - 2` is over, and then `k` of the next
chunk of that stage is loaded. `v` is loaded over the outputs of the chunk before, when these have
been stored.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import chunk_inverses, pairs
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, launches, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.program import (
    WIDTH,
    Inputs,
    Own,
    Pipeline,
    Place,
    Plan,
    Results,
    Walk,
    fill_rounds,
    fills,
)
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.tuning import Config, config_of, find_config

__all__ = ["covers", "launch"]

SERVERS = 2  # producer warpgroups, and consumer warpgroups


def covers(shape: Shape, *, save: bool) -> bool:
    """Whether a delta rule of this shape is to run here.

    The inverse is then computed by the only thread block that reads it, with tiles in bfloat16.
    Residuals for the backward need more registers than two warpgroups leave.
    """
    full = fills(shape, shape.value_dim)
    config = find_config("run_states_fused", shape, save=save, full=full)
    if config is None or shape.dtype != jnp.bfloat16:
        return False
    programs, odd = divmod(shape.batch * shape.heads, config.items)
    # Without inverses two thread blocks share an SM where two items do here, and end more evenly.
    return config.items == 1 or (not odd and fill_rounds(programs))


def _config(plan: Plan) -> Config:
    return config_of("run_states_fused", plan.shape)


class Barriers(NamedTuple):
    """Loads signal `k`, `q` and `v`; producers `ready`; consumers the others."""

    applied: Ref
    end: Ref
    freed: Ref
    k: Ref
    q: Ref
    ready: Ref
    v: Ref


def _place(plan: Plan, number: Index) -> tuple[Index, Index]:
    """Batch and head of a chunk, or of a warpgroup of those that have a head each."""
    heads = _config(plan).items
    head = lax.axis_index("program") * heads + lax.rem(number, heads)
    return lax.div(head, plan.shape.heads), lax.rem(head, plan.shape.heads)


def _stages(plan: Plan, inputs: Inputs) -> Inputs:
    """Return the types of the tiles of all stages."""
    config = _config(plan)
    tile = functools.partial(smem.tile, dtype=plan.shape.dtype)

    def vector(x: jax.Array | None) -> Ref:
        return None if x is None else plgpu.SMEM((config.stages, CHUNK), jnp.float32)

    return Inputs(
        v=tile(config.value_stages, SERVERS, CHUNK, WIDTH),
        q=tile(SERVERS, CHUNK, plan.shape.key_dim),
        k=tile(config.stages, CHUNK, plan.shape.key_dim),
        inverse=chunk_inverses.inverse_tiles(plan.shape.dtype, SERVERS),
        beta=vector(inputs.beta),
        b=vector(inputs.b),
        b_column=vector(inputs.b_column),
        decay=vector(inputs.decay),
        rest=vector(inputs.rest),
        scores=tile(SERVERS, CHUNK, CHUNK),
    )


def _vectors(x: Inputs) -> Inputs:
    """The vectors of a chunk alone."""
    return Inputs(beta=x.beta, b=x.b, b_column=x.b_column, decay=x.decay, rest=x.rest)


def _barriers(plan: Plan, vectors: int) -> Barriers:
    config = _config(plan)
    every = functools.partial(plgpu.Barrier, num_arrivals=plan.config.columns)
    return Barriers(
        applied=every(num_barriers=SERVERS),
        end=plgpu.Barrier(num_arrivals=SERVERS),
        freed=every(num_barriers=SERVERS),
        k=plgpu.Barrier(num_arrivals=1 + vectors, num_barriers=config.stages),
        q=plgpu.Barrier(num_barriers=SERVERS),
        ready=plgpu.Barrier(num_barriers=SERVERS),
        v=plgpu.Barrier(num_barriers=SERVERS * config.value_stages),
    )


def _serve(plan: Plan, refs: Inputs, stages: Inputs, barriers: Barriers, server: Index) -> None:
    """Produce: load `q` and `k` of every other chunk, and prepare its inverse and scores."""
    config = _config(plan)
    heads = config.items
    chunks = plan.shape.chunks * heads

    def load(source: Ref, tiles: Ref, loaded: Ref, i: Index, stage: Index) -> None:
        batch, head = _place(plan, i)
        tokens = pl.ds(lax.div(i, heads) * CHUNK, CHUNK)
        source = source.at[batch, tokens, lax.div(head, plan.shape.group)]
        plgpu.copy_gmem_to_smem(source, tiles.at[stage], loaded.at[stage])

    load_query = functools.partial(load, refs.q, stages.q, barriers.q)

    def load_keys(i: Index) -> None:
        stage = lax.rem(i, config.stages)
        load(refs.k, stages.k, barriers.k, i, stage)
        batch, head = _place(plan, i)
        for vector, tiles in zip(_vectors(refs), _vectors(stages), strict=True):
            if vector is not None:
                source = vector.at[batch, lax.div(i, heads), head]
                plgpu.copy_gmem_to_smem(source, tiles.at[stage], barriers.k.at[stage])

    def step(turn: Index, _: None) -> None:
        # Recomputed: an index known to stay the same would make the compiler hold the
        # addresses in all tiles in registers over the loop, and spill.
        server = lax.axis_index("role") - SERVERS
        inverse = launches.at(stages.inverse, lambda: server)
        i = SERVERS * turn + server
        stage = lax.rem(i, config.stages)

        plgpu.barrier_wait(barriers.k.at[stage])
        tile = launches.at(_vectors(stages)._replace(k=stages.k), lambda: stage)
        q = stages.q.at[server]

        def load_queries() -> None:
            @pl.when(turn > 0)
            def _() -> None:
                plgpu.barrier_wait(barriers.applied.at[server])
                load_query(i, server)

        def load_following() -> None:
            @pl.when(turn > 0)
            def _() -> None:
                plgpu.barrier_wait(barriers.freed.at[server])
                following = i - SERVERS + config.stages
                pl.when(following < chunks)(lambda: load_keys(following))

        x = chunk_inverses.minus_overlaps(tile.k, tile.beta, tile.b, tile.b_column, load_queries)
        chunk_inverses.store_inverse(x, inverse, dtype=plan.shape.dtype, interpret=plan.interpret)
        plgpu.barrier_wait(barriers.q.at[server])
        scores = pairs.decayed(pairs.overlaps(q, tile.k, load_following), tile.b, tile.b_column)
        scores = lanes.masked(scores, interpret=plan.interpret)
        stages.scores.at[server][...] = scores.astype(plan.shape.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.ready.at[server])

    for i in range(0, config.stages, SERVERS):
        pl.when(server + i < chunks)(functools.partial(load_keys, server + i))
    pl.when(server < chunks)(lambda: load_query(server, server))
    turns = lax.div(chunks + SERVERS - 1 - server, SERVERS)
    lax.fori_loop(0, turns, step, None)

    @pl.when(turns > 0)
    def _() -> None:
        plgpu.barrier_wait(barriers.applied.at[server])
        plgpu.barrier_wait(barriers.freed.at[server])

    # Producers stay: a warpgroup that leaves while another still multiplies faults.
    plgpu.barrier_wait(barriers.end)


def _pipeline(
    plan: Plan, refs: Inputs, stages: Inputs, barriers: Barriers, place: Place, role: Index
) -> Pipeline:
    """Return the pipeline of one consumer warpgroup, which loads its own columns of `v`."""
    batch, head, columns = place
    config = _config(plan)
    heads = config.items

    def number(i: Index) -> Index:
        return i * heads + lax.rem(role, heads)

    def values(i: Index) -> tuple[Ref, Ref]:
        stage = lax.rem(i, config.value_stages)
        return stages.v.at[stage, role], barriers.v.at[role * config.value_stages + stage]

    def load(i: Index) -> None:
        source = refs.v.at[batch, pl.ds(i * CHUNK, CHUNK), head, columns]
        plgpu.copy_gmem_to_smem(source, *values(i))

    def wait(i: Index) -> tuple[Inputs, Own]:
        stage, server = lax.rem(number(i), config.stages), lax.rem(number(i), SERVERS)
        v, loaded = values(i)
        plgpu.barrier_wait(barriers.k.at[stage])
        plgpu.barrier_wait(barriers.q.at[server])
        plgpu.barrier_wait(loaded)
        tile = launches.at(_vectors(stages)._replace(k=stages.k), lambda: stage)
        q, scores = stages.q.at[server], stages.scores.at[server]
        inverse = stages.inverse.left.at[server], stages.inverse.right.at[server]
        return tile._replace(v=v, q=q, scores=scores, inverse=inverse), Own(o=v)

    def at(barrier: Ref, i: Index) -> Ref:
        return barrier.at[lax.rem(number(i), SERVERS)]

    def stored(i: Index) -> None:
        ahead = i + config.value_stages - 1
        pl.when(jnp.logical_and(i > 0, ahead < plan.shape.chunks))(lambda: load(ahead))

    for i in range(min(config.value_stages, plan.shape.chunks)):
        load(i)
    return Pipeline(
        wait,
        wait_inverse=lambda i: plgpu.barrier_wait(at(barriers.ready, i)),
        release_inverse=lambda i: plgpu.barrier_arrive(at(barriers.applied, i)),
        wait_scores=lambda i: None,
        release=lambda i: plgpu.barrier_arrive(at(barriers.freed, i)),
        stored=stored,
    )


def _body(
    plan: Plan, walk: Walk, refs: Inputs, out: Any, stages: Inputs, barriers: Barriers
) -> None:
    role, registers = lax.axis_index("role"), _config(plan).registers

    @pl.when(role < SERVERS)
    def _() -> None:
        plgpu.set_max_registers(registers[0], action="increase")
        batch, head = _place(plan, role)
        place = Place(batch, head, pl.ds(lax.rem(role, plan.config.columns) * WIDTH, WIDTH))
        pipeline = _pipeline(plan, refs, stages, barriers, place, role)
        walk(plan, refs, out, Own, pipeline, place)
        plgpu.barrier_arrive(barriers.end)

    @pl.when(role >= SERVERS)
    def _() -> None:
        plgpu.set_max_registers(registers[1], action="decrease")
        _serve(plan, refs, stages, barriers, role - SERVERS)


def launch(
    name: str, plan: Plan, walk: Walk, inputs: Inputs, outputs: Results, *, interpret: object
) -> Results:
    """Run `walk` as `program.launch` does, on inverses that are computed on the way."""
    vectors = sum(x is not None for x in _vectors(inputs))
    return launches.launch(
        name,
        functools.partial(_body, plan, walk),
        inputs,
        outputs,
        _stages(plan, inputs),
        _barriers(plan, vectors),
        programs=plan.shape.batch * plan.shape.heads // _config(plan).items,
        warpgroups=2 * SERVERS,
        interpret=interpret,
    )
