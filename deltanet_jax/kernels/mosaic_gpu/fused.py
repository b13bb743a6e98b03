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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import prep, tiles
from deltanet_jax.kernels.mosaic_gpu.serial import WIDTH, Plan, Turns, columns_of

__all__ = ["covers", "launch"]

CHUNK = tiles.CHUNK
SERVERS = 2  # warpgroups that prepare; the turns below count on two
REGISTERS = 176, 80  # of a warpgroup that computes, and of one that prepares


def _depths(plan: Plan) -> tuple[int, int]:
    """Chunks of `k` and of `v` in shared memory; the states that are saved take the rest."""
    return (2, 2) if plan.save else (4, 3)


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
    key_depth, value_depth = _depths(plan)
    buffers = {"k": tile(key_depth, CHUNK, plan.key_dim), "q": tile(SERVERS, CHUNK, plan.key_dim)}
    buffers |= {"v": tile(value_depth, plan.columns, CHUNK, WIDTH)}
    buffers |= {"scores": tile(SERVERS, CHUNK, CHUNK)}
    buffers |= dict.fromkeys(plan.vectors, plgpu.SMEM((key_depth, CHUNK), jnp.float32))
    return buffers | {"inverse": prep.inverse_buffers(plan.dtype, SERVERS)}


def _barriers(plan: Plan) -> dict:
    """Loads say `k`, `q`, `v`; the servers `ready`; those that compute the others."""
    every = functools.partial(plgpu.Barrier, num_arrivals=plan.columns)
    key_depth, value_depth = _depths(plan)
    return {
        "k": plgpu.Barrier(num_arrivals=1 + len(plan.vectors), num_barriers=key_depth),
        "q": plgpu.Barrier(num_barriers=SERVERS),
        "v": plgpu.Barrier(num_barriers=plan.columns * value_depth),
        "ready": plgpu.Barrier(num_barriers=SERVERS),
        "applied": every(num_barriers=SERVERS),
        "freed": every(num_barriers=SERVERS),
        "end": every(num_barriers=1),
    }


def _serve(plan: Plan, refs, buffers, barriers, place, server):
    """Loads `q` and `k` of every other chunk, and prepares its inverse and scores."""
    batch, head = place
    depth, _ = _depths(plan)

    def load(name, i, stage):
        tokens = pl.ds(i * CHUNK, CHUNK)
        source = refs[name].at[batch, tokens, lax.div(head, plan.group)]
        plgpu.copy_gmem_to_smem(source, buffers[name].at[stage], barriers[name].at[stage])

    def load_keys(i):
        stage = lax.rem(i, depth)
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
        stage = lax.rem(i, depth)

        def renew_keys():
            plgpu.barrier_wait(barriers["freed"].at[server])
            following = i - SERVERS + depth
            pl.when(following < plan.chunks)(lambda: load_keys(following))

        if depth == SERVERS:
            pl.when(turn > 0)(renew_keys)
        plgpu.barrier_wait(barriers["k"].at[stage])
        tile = {name: buffers[name].at[stage] for name in ("k", *plan.vectors)}
        tile["q"] = buffers["q"].at[server]
        x = prep.below_diagonal(plan, tile)

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(barriers["applied"].at[server])
            load("q", i, server)

        if plan.save:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        halves = prep.store_inverse(x, inverse, dtype=plan.dtype, interpret=plan.interpret)
        if depth > SERVERS:
            pl.when(turn > 0)(renew_keys)
        plgpu.barrier_wait(barriers["q"].at[server])
        buffers["scores"].at[server][...] = tiles.scores(plan, tile).astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers["ready"].at[server])
        if plan.save:
            prep.copy_inverse(halves, refs["inverse"].at[batch, i, head])

    for i in range(0, depth, SERVERS):
        pl.when(server + i < plan.chunks)(lambda i=i: load_keys(server + i))
    pl.when(server < plan.chunks)(lambda: load("q", server, server))
    turns = lax.div(plan.chunks + SERVERS - 1 - server, SERVERS)
    lax.fori_loop(0, turns, step, None)

    @pl.when(turns > 0)
    def _():
        plgpu.barrier_wait(barriers["applied"].at[server])
        plgpu.barrier_wait(barriers["freed"].at[server])

    plgpu.wait_smem_to_gmem(0)
    # No warpgroup may leave while another one still multiplies.
    plgpu.barrier_wait(barriers["end"].at[0])


def _turns(plan: Plan, refs, buffers, own, barriers, place, role) -> Turns:
    """Of one computing warpgroup, which loads its own columns of `v`."""
    batch, head, columns = place
    key_depth, value_depth = _depths(plan)

    def values(i):
        stage = lax.rem(i, value_depth)
        return buffers["v"].at[stage, role], barriers["v"].at[role * value_depth + stage]

    def load(i):
        source = refs["v"].at[batch, pl.ds(i * CHUNK, CHUNK), head, columns]
        plgpu.copy_gmem_to_smem(source, *values(i))

    def wait(i):
        stage, server = lax.rem(i, key_depth), lax.rem(i, SERVERS)
        v, loaded = values(i)
        plgpu.barrier_wait(barriers["k"].at[stage])
        plgpu.barrier_wait(barriers["q"].at[server])
        plgpu.barrier_wait(loaded)
        tile = own | {name: buffers[name].at[stage] for name in ("k", *plan.vectors)}
        tile |= {name: buffers[name].at[server] for name in ("q", "scores")}
        halves = ("below_high", "below_low")
        inverse = tuple(buffers["inverse"][name].at[server] for name in halves)
        return tile | {"v": v, "o": v, "inverse": inverse}

    def arrive(name):
        return lambda i: plgpu.barrier_arrive(barriers[name].at[lax.rem(i, SERVERS)])

    def stored(i):
        ahead = i + value_depth - 1
        pl.when(jnp.logical_and(i > 0, ahead < plan.chunks))(lambda: load(ahead))

    for i in range(min(value_depth, plan.chunks)):
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
        own = {x: ref.at[role] for x, ref in buffers["own"].items()}
        turns = _turns(plan, refs, buffers, own, barriers, (batch, head, columns), role)
        walk(plan, refs, own, turns, batch, head, columns)
        plgpu.barrier_arrive(barriers["end"].at[0])

    @pl.when(role >= plan.columns)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _serve(plan, refs, buffers, barriers, (batch, head), role - plan.columns)


def launch(
    name: str, plan: Plan, walk, inputs: dict, outputs: dict, own: dict, *, interpret
) -> dict:
    """Runs `walk` as `serial.launch` does, on inverses that are computed on the way."""
    if plan.save:
        sizes = (plan.batch, plan.chunks, plan.heads, CHUNK, CHUNK)
        outputs = outputs | {"inverse": jax.ShapeDtypeStruct(sizes, plan.dtype)}
    names = (*inputs, *outputs)
    # The outputs take the place of the values.
    tile = functools.partial(tiles.tile, plan.columns, dtype=plan.dtype)
    buffers = {"own": {x: tile(*sizes) for x, sizes in own.items() if x != "o"}}
    kernel = plgpu.kernel(
        tiles.named(name, functools.partial(_body, plan, walk, names)),
        out_type=tuple(outputs.values()),
        scratch_types=(buffers | _buffers(plan), _barriers(plan)),
        grid=(plan.batch * plan.heads,),
        grid_names=("program",),
        num_threads=plan.columns + SERVERS,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return dict(zip(outputs, kernel(*inputs.values()), strict=True))
