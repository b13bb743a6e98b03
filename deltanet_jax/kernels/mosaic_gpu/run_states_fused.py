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

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import chunk_inverses, pairs
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, launches, smem
from deltanet_jax.kernels.mosaic_gpu.program import WIDTH, Plan, Turns, are_few, fill_rounds
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["covers", "launch"]

SERVERS = 2  # producer warpgroups, and consumer warpgroups
KEYS, VALUES = 4, 3  # chunks of `k` and of `v` in shared memory
# Registers per thread of a consumer and of a producer warpgroup, by K = V.
REGISTERS = {128: (184, 72), 64: (168, 88)}


def covers(shape: Shape, *, save: bool) -> bool:
    """Whether a delta rule of this shape is to run here.

    The inverse is then computed by the only thread block that reads it, with tiles in bfloat16.
    Residuals for the backward need more registers than two warpgroups leave.
    """
    square = shape.key_dim == shape.value_dim and shape.key_dim in REGISTERS
    if save or not square or shape.dtype != jnp.bfloat16:
        return False
    if shape.key_dim == 128:
        return not are_few(shape, shape.value_dim)
    # Thread blocks without inverses share an SM there, and so end more evenly.
    programs, odd = divmod(shape.batch * shape.heads, SERVERS * WIDTH // shape.value_dim)
    return not odd and fill_rounds(programs)


def _heads(plan: Plan) -> int:
    """Count the heads of a thread block."""
    return SERVERS // plan.columns


def _place(plan: Plan, number) -> tuple:
    """Batch and head of a chunk, or of a warpgroup of those that have a head each."""
    heads = _heads(plan)
    head = lax.axis_index("program") * heads + lax.rem(number, heads)
    return lax.div(head, plan.shape.heads), lax.rem(head, plan.shape.heads)


def _buffers(plan: Plan) -> dict:
    tile = functools.partial(smem.tile, dtype=plan.shape.dtype)
    buffers = {
        "k": tile(KEYS, CHUNK, plan.shape.key_dim),
        "q": tile(SERVERS, CHUNK, plan.shape.key_dim),
    }
    buffers |= {"v": tile(VALUES, SERVERS, CHUNK, WIDTH)}
    buffers |= {"scores": tile(SERVERS, CHUNK, CHUNK)}
    buffers |= dict.fromkeys(plan.vectors, plgpu.SMEM((KEYS, CHUNK), jnp.float32))
    return buffers | {"inverse": chunk_inverses.inverse_buffers(plan.shape.dtype, SERVERS)}


def _barriers(plan: Plan) -> dict:
    """Loads signal `k`, `q`, `v`; producers `ready`; consumers the others."""
    every = functools.partial(plgpu.Barrier, num_arrivals=plan.columns)
    return {
        "k": plgpu.Barrier(num_arrivals=1 + len(plan.vectors), num_barriers=KEYS),
        "q": plgpu.Barrier(num_barriers=SERVERS),
        "v": plgpu.Barrier(num_barriers=SERVERS * VALUES),
        "ready": plgpu.Barrier(num_barriers=SERVERS),
        "applied": every(num_barriers=SERVERS),
        "freed": every(num_barriers=SERVERS),
        "end": plgpu.Barrier(num_arrivals=SERVERS),
    }


def _serve(plan: Plan, refs, buffers, barriers, server):
    """Produce: load `q` and `k` of every other chunk, and prepare its inverse and scores."""
    heads = _heads(plan)
    chunks = plan.shape.chunks * heads

    def load(name, i, stage):
        batch, head = _place(plan, i)
        tokens = pl.ds(lax.div(i, heads) * CHUNK, CHUNK)
        source = refs[name].at[batch, tokens, lax.div(head, plan.shape.group)]
        plgpu.copy_gmem_to_smem(source, buffers[name].at[stage], barriers[name].at[stage])

    def load_keys(i):
        stage = lax.rem(i, KEYS)
        load("k", i, stage)
        batch, head = _place(plan, i)
        for name in plan.vectors:
            source = refs[name].at[batch, lax.div(i, heads), head]
            target = buffers[name].at[stage]
            plgpu.copy_gmem_to_smem(source, target, barriers["k"].at[stage])

    def step(turn, _):
        # Recomputed: an index known to stay the same would make the compiler hold the
        # addresses in all tiles in registers over the loop, and spill.
        server = lax.axis_index("role") - SERVERS
        inverse = {name: x.at[server] for name, x in buffers["inverse"].items()}
        i = SERVERS * turn + server
        stage = lax.rem(i, KEYS)

        plgpu.barrier_wait(barriers["k"].at[stage])
        tile = {name: buffers[name].at[stage] for name in ("k", *plan.vectors)}
        tile["q"] = buffers["q"].at[server]

        def load_queries():
            @pl.when(turn > 0)
            def _():
                plgpu.barrier_wait(barriers["applied"].at[server])
                load("q", i, server)

        def load_following():
            @pl.when(turn > 0)
            def _():
                plgpu.barrier_wait(barriers["freed"].at[server])
                following = i - SERVERS + KEYS
                pl.when(following < chunks)(lambda: load_keys(following))

        x = chunk_inverses.minus_overlaps(plan.shape, tile, load_queries)
        chunk_inverses.store_inverse(x, inverse, dtype=plan.shape.dtype, interpret=plan.interpret)
        plgpu.barrier_wait(barriers["q"].at[server])
        scores = pairs.decayed(plan.shape, tile, pairs.overlaps(tile, "q", load_following))
        scores = lanes.masked(scores, interpret=plan.interpret)
        buffers["scores"].at[server][...] = scores.astype(plan.shape.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers["ready"].at[server])

    for i in range(0, KEYS, SERVERS):
        pl.when(server + i < chunks)(lambda i=i: load_keys(server + i))
    pl.when(server < chunks)(lambda: load("q", server, server))
    turns = lax.div(chunks + SERVERS - 1 - server, SERVERS)
    lax.fori_loop(0, turns, step, None)

    @pl.when(turns > 0)
    def _():
        plgpu.barrier_wait(barriers["applied"].at[server])
        plgpu.barrier_wait(barriers["freed"].at[server])

    # Producers stay: a warpgroup that leaves while another still multiplies faults.
    plgpu.barrier_wait(barriers["end"])


def _turns(plan: Plan, refs, buffers, barriers, place, role) -> Turns:
    """Return the pipeline of one consumer warpgroup, which loads its own columns of `v`."""
    batch, head, columns = place
    heads = _heads(plan)

    def number(i):
        return i * heads + lax.rem(role, heads)

    def values(i):
        stage = lax.rem(i, VALUES)
        return buffers["v"].at[stage, role], barriers["v"].at[role * VALUES + stage]

    def load(i):
        source = refs["v"].at[batch, pl.ds(i * CHUNK, CHUNK), head, columns]
        plgpu.copy_gmem_to_smem(source, *values(i))

    def wait(i):
        stage, server = lax.rem(number(i), KEYS), lax.rem(number(i), SERVERS)
        v, loaded = values(i)
        plgpu.barrier_wait(barriers["k"].at[stage])
        plgpu.barrier_wait(barriers["q"].at[server])
        plgpu.barrier_wait(loaded)
        tile = {name: buffers[name].at[stage] for name in ("k", *plan.vectors)}
        tile |= {name: buffers[name].at[server] for name in ("q", "scores")}
        inverse = tuple(buffers["inverse"][side].at[server] for side in chunk_inverses.SIDES)
        return tile | {"v": v, "o": v, "inverse": inverse}

    def at(name, i):
        return barriers[name].at[lax.rem(number(i), SERVERS)]

    def stored(i):
        ahead = i + VALUES - 1
        pl.when(jnp.logical_and(i > 0, ahead < plan.shape.chunks))(lambda: load(ahead))

    for i in range(min(VALUES, plan.shape.chunks)):
        load(i)
    return Turns(
        wait,
        wait_inverse=lambda i: plgpu.barrier_wait(at("ready", i)),
        free_inverse=lambda i: plgpu.barrier_arrive(at("applied", i)),
        wait_scores=lambda i: None,
        free=lambda i: plgpu.barrier_arrive(at("freed", i)),
        stored=stored,
    )


def _body(plan: Plan, walk, names, *args):
    *refs, buffers, barriers = args
    refs = dict(zip(names, refs, strict=True))
    role, registers = lax.axis_index("role"), REGISTERS[plan.shape.key_dim]

    @pl.when(role < SERVERS)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        batch, head = _place(plan, role)
        columns = pl.ds(lax.rem(role, plan.columns) * WIDTH, WIDTH)
        turns = _turns(plan, refs, buffers, barriers, (batch, head, columns), role)
        walk(plan, refs, dict, turns, batch, head, columns)
        plgpu.barrier_arrive(barriers["end"])

    @pl.when(role >= SERVERS)
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")
        _serve(plan, refs, buffers, barriers, role - SERVERS)


def launch(name: str, plan: Plan, walk, inputs: dict, outputs: dict, *, interpret) -> dict:
    """Run `walk` as `program.launch` does, on inverses that are computed on the way."""
    names = (*inputs, *outputs)
    kernel = plgpu.kernel(
        launches.named(name, functools.partial(_body, plan, walk, names)),
        out_type=tuple(outputs.values()),
        scratch_types=(_buffers(plan), _barriers(plan)),
        grid=(plan.shape.batch * plan.shape.heads // _heads(plan),),
        grid_names=("program",),
        num_threads=2 * SERVERS,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return dict(zip(outputs, kernel(*inputs.values()), strict=True))
