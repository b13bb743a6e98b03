"""Outputs and states in one kernel with the inverses, where every head has a multiprocessor.

Beside the warpgroups that compute, two prepare the scores and the inverses of the chunks ahead,
one the even chunks and the other the odd ones. `k`, `q`, `v` are read once, and no inverse
leaves its multiprocessor.

What is in shared memory, and what it waits for: the inverse of chunk `i` takes the place of that
of `i - 2` once that was applied, and `q` too; the scores once chunk `i - 2` is over, and then `k`
of the chunk that comes in its place is loaded; `v` is loaded over the outputs of the chunk before
when these have been stored.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import lanes, prep, tiles
from deltanet_jax.kernels.mosaic_gpu.serial import WIDTH, Plan, Turns, columns_of

__all__ = ["covers", "launch"]

CHUNK = tiles.CHUNK
SERVERS = 2  # warpgroups that prepare; the turns below count on two
KEYS, VALUES = 4, 3  # chunks of `k` and of `v` in shared memory
REGISTERS = 176, 80  # of a warpgroup that computes, and of one that prepares


def covers(k, v, *, save: bool) -> bool:
    """Whether to run the keys `[B, T, H, K]` and values `[B, T, HV, V]` of a delta rule here.

    The inverse is then computed by the only program that reads it, and its tiles are in bfloat16.
    What is saved for the backward asks for more registers than two warpgroups leave.
    """
    batch, key_dim, (heads, value_dim) = k.shape[0], k.shape[3], v.shape[2:]
    whole = value_dim == columns_of(batch, heads, key_dim, value_dim) * WIDTH
    return not save and whole and key_dim == value_dim == 128 and k.dtype == jnp.bfloat16


def _buffers(plan: Plan) -> dict:
    tile = functools.partial(tiles.tile, dtype=plan.dtype)
    buffers = {"k": tile(KEYS, CHUNK, plan.key_dim), "q": tile(SERVERS, CHUNK, plan.key_dim)}
    buffers |= {"v": tile(VALUES, plan.columns, CHUNK, WIDTH)}
    buffers |= {"scores": tile(SERVERS, CHUNK, CHUNK)}
    buffers |= dict.fromkeys(plan.vectors, plgpu.SMEM((KEYS, CHUNK), jnp.float32))
    return buffers | {"inverse": prep.inverse_buffers(plan.dtype, SERVERS)}


def _barriers(plan: Plan) -> dict:
    """Loads say `k`, `q`, `v`; the servers `ready`; those that compute the others."""
    every = functools.partial(plgpu.Barrier, num_arrivals=plan.columns)
    return {
        "k": plgpu.Barrier(num_arrivals=1 + len(plan.vectors), num_barriers=KEYS),
        "q": plgpu.Barrier(num_barriers=SERVERS),
        "v": plgpu.Barrier(num_barriers=plan.columns * VALUES),
        "ready": plgpu.Barrier(num_barriers=SERVERS),
        "applied": every(num_barriers=SERVERS),
        "freed": every(num_barriers=SERVERS),
        "end": every(num_barriers=1),
    }


def _serve(plan: Plan, refs, buffers, barriers, place, server):
    """Loads `q` and `k` of every other chunk, and prepares its inverse and scores."""
    batch, head = place

    def load(name, i, stage):
        tokens = pl.ds(i * CHUNK, CHUNK)
        source = refs[name].at[batch, tokens, lax.div(head, plan.group)]
        plgpu.copy_gmem_to_smem(source, buffers[name].at[stage], barriers[name].at[stage])

    def load_keys(i):
        stage = lax.rem(i, KEYS)
        load("k", i, stage)
        for name in plan.vectors:
            source, target = refs[name].at[batch, i, head], buffers[name].at[stage]
            plgpu.copy_gmem_to_smem(source, target, barriers["k"].at[stage])

    def step(turn, _):
        # Asked for again: an index known to stay the same would make the compiler hold the
        # addresses in all tiles in registers over the loop, and spill.
        server = lax.axis_index("role") - plan.columns
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
                pl.when(following < plan.chunks)(lambda: load_keys(following))

        x = prep.minus_overlaps(plan, tile, load_queries)
        prep.store_inverse(x, inverse, dtype=plan.dtype, interpret=plan.interpret)
        plgpu.barrier_wait(barriers["q"].at[server])
        scores = tiles.decayed(plan, tile, tiles.overlaps(tile, "q", load_following))
        scores = lanes.lower_triangle(scores, strict=False, interpret=plan.interpret)
        buffers["scores"].at[server][...] = scores.astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers["ready"].at[server])

    for i in range(0, KEYS, SERVERS):
        pl.when(server + i < plan.chunks)(lambda i=i: load_keys(server + i))
    pl.when(server < plan.chunks)(lambda: load("q", server, server))
    turns = lax.div(plan.chunks + SERVERS - 1 - server, SERVERS)
    lax.fori_loop(0, turns, step, None)

    @pl.when(turns > 0)
    def _():
        plgpu.barrier_wait(barriers["applied"].at[server])
        plgpu.barrier_wait(barriers["freed"].at[server])

    # No warpgroup may leave while another one still multiplies.
    plgpu.barrier_wait(barriers["end"].at[0])


def _turns(plan: Plan, refs, buffers, barriers, place, role) -> Turns:
    """Of one computing warpgroup, which loads its own columns of `v`."""
    batch, head, columns = place

    def values(i):
        stage = lax.rem(i, VALUES)
        return buffers["v"].at[stage, role], barriers["v"].at[role * VALUES + stage]

    def load(i):
        source = refs["v"].at[batch, pl.ds(i * CHUNK, CHUNK), head, columns]
        plgpu.copy_gmem_to_smem(source, *values(i))

    def wait(i):
        stage, server = lax.rem(i, KEYS), lax.rem(i, SERVERS)
        v, loaded = values(i)
        plgpu.barrier_wait(barriers["k"].at[stage])
        plgpu.barrier_wait(barriers["q"].at[server])
        plgpu.barrier_wait(loaded)
        tile = {name: buffers[name].at[stage] for name in ("k", *plan.vectors)}
        tile |= {name: buffers[name].at[server] for name in ("q", "scores")}
        inverse = tuple(buffers["inverse"][side].at[server] for side in prep.SIDES)
        return tile | {"v": v, "o": v, "inverse": inverse}

    def arrive(name):
        return lambda i: plgpu.barrier_arrive(barriers[name].at[lax.rem(i, SERVERS)])

    def stored(i):
        ahead = i + VALUES - 1
        pl.when(jnp.logical_and(i > 0, ahead < plan.chunks))(lambda: load(ahead))

    for i in range(min(VALUES, plan.chunks)):
        load(i)
    return Turns(
        wait,
        wait_inverse=lambda i: plgpu.barrier_wait(barriers["ready"].at[lax.rem(i, SERVERS)]),
        free_inverse=arrive("applied"),
        wait_scores=lambda i: None,
        free=arrive("freed"),
        stored=stored,
    )


def _body(plan: Plan, walk, names, *args):
    *refs, buffers, barriers = args
    refs = dict(zip(names, refs, strict=True))
    role, item = lax.axis_index("role"), lax.axis_index("program")
    batch, head = lax.div(item, plan.heads), lax.rem(item, plan.heads)

    @pl.when(role < plan.columns)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        columns = pl.ds(role * WIDTH, WIDTH)
        turns = _turns(plan, refs, buffers, barriers, (batch, head, columns), role)
        walk(plan, refs, {}, turns, batch, head, columns)
        plgpu.barrier_arrive(barriers["end"].at[0])

    @pl.when(role >= plan.columns)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _serve(plan, refs, buffers, barriers, (batch, head), role - plan.columns)


def launch(name: str, plan: Plan, walk, inputs: dict, outputs: dict, *, interpret) -> dict:
    """Runs `walk` as `serial.launch` does, on inverses that are computed on the way."""
    names = (*inputs, *outputs)
    kernel = plgpu.kernel(
        tiles.named(name, functools.partial(_body, plan, walk, names)),
        out_type=tuple(outputs.values()),
        scratch_types=(_buffers(plan), _barriers(plan)),
        grid=(plan.batch * plan.heads,),
        grid_names=("program",),
        num_threads=plan.columns + SERVERS,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return dict(zip(outputs, kernel(*inputs.values()), strict=True))
