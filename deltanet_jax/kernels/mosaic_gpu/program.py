"""Common parts of the two recurrent kernels: heads and columns of a thread block, and loads.

An item of work is the chunks of one head. Columns of V never meet, so each warpgroup owns 64 of
them and shares `q`, `k` and the inverse with the others of its item; one more warpgroup issues
loads, one or two chunks ahead, and computes the scores of each chunk. Most thread blocks have one
item, those of small heads two, which share an SM and nothing else.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import pairs, state_planes
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, launches, smem
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.tuning import sm_count

__all__ = [
    "WIDTH",
    "Plan",
    "Turns",
    "are_few",
    "fill_rounds",
    "inputs_of",
    "launch",
    "plane",
    "vectors_of",
]

WIDTH = 64  # columns of V of one warpgroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Mode of a recurrent kernel, and what follows from it; a vector gate is in the keys."""

    shape: Shape
    interpret: bool
    scale: float = 1.0
    save: bool = False  # what the backward needs
    map_dim: int = 0  # columns after those of V that carry the map of the state
    only_state: bool = False  # no outputs but the state after the last chunk
    reverse: bool = False  # the last chunk comes first, for gradients

    @property
    def group(self) -> int:
        """Value heads that read the same keys; those decayed by a vector gate have one each."""
        return 1 if self.shape.vector_gate else self.shape.group

    @property
    def columns(self) -> int:
        """Consumer warpgroups of an item, each on WIDTH columns of V.

        Shared memory holds the state and two stages of one warpgroup at K = 256. Where thread
        blocks are few, a warpgroup alone on its SM is faster.
        """
        alone = self.shape.key_dim > 128 or WIDTH in (self.shape.value_dim, self.map_dim)
        return 1 if alone or are_few(self.shape, self.shape.value_dim + self.map_dim) else 2

    @property
    def vectors(self) -> tuple[str, ...]:
        """Vectors to load with every chunk; row and column views of one need two copies."""
        gate = ("b", "b_column") if self.reverse else ("b", "b_column", "decay", "rest")
        names = ("beta",) * self.shape.delta + gate * self.shape.scalar_gate
        return names + ("kept",) * self.shape.vector_gate

    @property
    def slices(self) -> int:
        return (self.shape.value_dim + self.map_dim) // (self.columns * WIDTH)

    @property
    def items(self) -> int:
        return self.shape.batch * self.shape.heads * self.slices

    @property
    def side_by_side(self) -> int:
        """Items of a thread block: four warpgroups can divide an SM unevenly, two blocks cannot."""
        small = (self.shape.key_dim, self.columns) == (64, 1)
        # With the delta rule and a vector gate, shared memory does not hold two with the
        # residuals for the backward, nor two of the backward.
        small &= not (self.shape.vector_gate and self.shape.delta and (self.save or self.reverse))
        return 2 if small and self.items > sm_count() else 1

    @property
    def stride(self) -> int:
        """Stride of the chunks whose incoming state is stored."""
        return state_planes.stride(self.shape)

    @property
    def rows(self) -> tuple:
        """The blocks of rows of the state."""
        return tuple(pl.ds(i, CHUNK) for i in range(0, self.shape.key_dim, CHUNK))

    @property
    def key_blocks(self) -> tuple:
        """The blocks of columns of the transposed state."""
        width = 128 if (self.shape.key_dim, self.columns) == (128, 1) else 64
        return tuple(pl.ds(i, width) for i in range(0, self.shape.key_dim, width))

    @property
    def key_tiles(self) -> tuple[str, ...]:
        """Tiles of keys: `k` reads, and writes unless there are `writes`."""
        reads = () if self.shape.vector_gate and not self.shape.delta else ("k",)
        return reads + ("writes",) * self.shape.vector_gate + (() if self.map_dim else ("q",))

    @property
    def writes(self) -> str:
        """The tile of the keys that write."""
        return "writes" if self.shape.vector_gate else "k"

    @property
    def pair_tiles(self) -> tuple[str, ...]:
        """Tiles of pairs of tokens that are loaded."""
        loaded = self.shape.vector_gate and not self.map_dim
        return ("inverse",) * self.shape.delta + ("scores",) * loaded

    @property
    def precise(self) -> bool:
        """Whether the right operand of the inverse keeps 16 bits of mantissa.

        Gradients of `beta` need it in one direction, where keys are similar; float16 keeps 11 bits
        as it is. At K = 128 the stores of residuals bound the forward, and the second product
        costs nothing; elsewhere only the backward has registers for it.
        """
        if self.shape.dtype != jnp.bfloat16 or self.only_state:
            return False
        return (
            self.shape.key_dim != 128 if self.reverse else self.save and self.shape.key_dim == 128
        )

    @property
    def score_tiles(self) -> int:
        """Tiles for `tril(D * (q k^T))` where it is computed; shared memory has one at K = 256."""
        if self.map_dim or self.shape.vector_gate:
            return 0
        return 2 if self.shape.key_dim <= 128 else 1

    @property
    def stages(self) -> int:
        """Chunks of an item in shared memory, which has two items at K = V = 64."""
        roomy = (self.shape.key_dim, self.columns) in ((128, 1), (64, 2))
        roomy |= self.shape.key_dim == 128 and not self.save and not self.reverse
        return 3 if roomy and not self.shape.vector_gate else 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a consumer and of a producer warpgroup.

        The sum over warpgroups is at most 512 (504 for three).
        """
        if self.side_by_side == 2:
            return 168, 88
        if self.map_dim:
            return 232, 40
        if self.columns == 1:
            # All that a thread can have is slower but where 248 would spill.
            full = self.shape.key_dim == 256 and self.shape.scalar_gate and self.save
            return 256 if full else 248, 152
        return 200, 104


class Turns(NamedTuple):
    """Pipeline between a consumer warpgroup and its producers, for the i-th chunk."""

    wait: Callable[[Any], dict]  # until it is loaded; returns its tiles
    wait_scores: Callable[[Any], None]  # once a chunk
    free: Callable[[Any], None]  # all of its tiles
    # Where the inverse is computed in the same thread block:
    wait_inverse: Callable[[Any], None] = lambda i: None
    free_inverse: Callable[[Any], None] = lambda i: None  # and `q`
    stored: Callable[[Any], None] = lambda i: None  # the outputs of the chunk before are


def inputs_of(q, k, inverse, vectors, channels) -> dict:
    """Return the inputs of both recurrent kernels by name, without absent ones."""
    inputs = {"q": q, "k": k, "inverse": inverse} | vectors | (channels or {})
    return {name: x for name, x in inputs.items() if x is not None}


def are_few(shape: Shape, columns: int) -> bool:
    """Whether thread blocks of two consumers would leave half of the SMs without one."""
    return shape.batch * shape.heads * columns // (2 * WIDTH) <= sm_count() // 2


def fill_rounds(programs: int) -> bool:
    """Whether thread blocks, one to an SM, leave at most a fifth of the waves idle."""
    rounds = -(-programs // sm_count())
    return 5 * programs >= 4 * rounds * sm_count()


def vectors_of(beta, b, exponentials=None) -> dict:
    """The vectors of every chunk; row and column views of one vector need two copies."""
    vectors = {} if beta is None else {"beta": beta}
    return vectors if b is None else vectors | {"b": b, "b_column": b} | (exponentials or {})


def _stages(plan: Plan, values: str) -> dict:
    tile = functools.partial(smem.tile, dtype=plan.shape.dtype)
    stages = plan.side_by_side * plan.stages
    buffers = dict.fromkeys(plan.key_tiles, tile(stages, CHUNK, plan.shape.key_dim))
    buffers[values] = tile(stages, plan.columns, CHUNK, WIDTH)
    if plan.score_tiles:
        buffers |= {"scores": tile(plan.side_by_side * plan.score_tiles, CHUNK, CHUNK)}
    buffers |= dict.fromkeys(plan.pair_tiles, tile(stages, CHUNK, CHUNK))
    sizes = dict.fromkeys(plan.vectors, CHUNK)
    if plan.shape.vector_gate:
        sizes["kept"] = plan.shape.key_dim
    return buffers | {x: plgpu.SMEM((stages, n), jnp.float32) for x, n in sizes.items()}


def _seat(plan: Plan):
    """Return the place of this warpgroup's item in its thread block.

    Recomputed wherever it is needed, see `lanes.zero`.
    """
    if plan.side_by_side == 1:
        return 0
    return lax.rem(lax.axis_index("role"), plan.side_by_side)


def _item(plan: Plan):
    return lax.axis_index("program") * plan.side_by_side + _seat(plan)


def _place(plan: Plan) -> tuple:
    """Batch, head and first columns of V of this warpgroup's item."""
    head, part = lax.div(_item(plan), plan.slices), lax.rem(_item(plan), plan.slices)
    return lax.div(head, plan.shape.heads), lax.rem(head, plan.shape.heads), part * plan.columns


def _column(plan: Plan):
    """Return the place of this warpgroup's columns of V among those of its item."""
    return lax.rem(lax.axis_index("role"), plan.columns)


def plane(plan: Plan):
    """Return the place of this warpgroup's columns of V among those of its head."""
    return _place(plan)[2] + _column(plan)


def _stage(plan: Plan, i):
    """Return the pipeline stage of the i-th chunk of this warpgroup's item."""
    return _seat(plan) * plan.stages + lax.rem(i, plan.stages)


def _score_tile(plan: Plan, i):
    return _seat(plan) * plan.score_tiles + lax.rem(i, plan.score_tiles)


def _load(plan: Plan, values: str, refs, buffers, loaded, i) -> None:
    """Issue the loads of the i-th chunk."""
    batch, head, first = _place(plan)
    stage = _stage(plan, i)
    chunk = plan.shape.chunks - 1 - i if plan.reverse else i

    def copy(name, *index, part=()):
        target = buffers[name].at[(stage, *part)]
        plgpu.copy_gmem_to_smem(refs[name].at[index], target, loaded.at[stage])

    tokens = pl.ds(chunk * CHUNK, CHUNK)
    for name in plan.key_tiles:
        copy(name, batch, tokens, lax.div(head, plan.group))
    for j in range(plan.columns):
        # A map has no values; it loads some and drops them.
        start = lax.rem((first + j) * WIDTH, plan.shape.value_dim)
        copy(values, batch, tokens, head, pl.ds(start, WIDTH), part=(j,))
    for name in plan.pair_tiles + plan.vectors:
        copy(name, batch, chunk, head)


def _serve(plan: Plan, load, buffers, barriers):
    """Produce: load every chunk and compute its scores."""
    loaded, ready, freed = barriers
    ahead = plan.stages - 1

    def pair(i):
        stage = _stage(plan, i)
        plgpu.barrier_wait(loaded.at[stage])
        tile = {x: buffers[x].at[stage] for x in (*plan.key_tiles, *plan.vectors)}
        scores = pairs.scores(plan.shape, tile, interpret=plan.interpret)
        scores = scores.astype(plan.shape.dtype)
        at = _score_tile(plan, i)
        buffers["scores"].at[at][...] = scores
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready.at[at])

    def step(i, _):
        # With two tiles the scores are ready before their chunk begins.
        if plan.score_tiles == 2:
            pair(i)
        last = _stage(plan, i + ahead)
        pl.when(i > 0)(lambda: plgpu.barrier_wait(freed.at[last]))
        pl.when(i + ahead < plan.shape.chunks)(lambda: load(i + ahead))
        if plan.score_tiles == 1:
            pair(i)

    for i in range(min(ahead, plan.shape.chunks)):
        load(i)
    lax.fori_loop(0, plan.shape.chunks, step, None)
    last = plan.shape.chunks - 1 + lanes.zero(interpret=plan.interpret)
    plgpu.barrier_wait(freed.at[_stage(plan, last)])


def _body(plan: Plan, walk, values: str, names, *args):
    *refs, buffers, loaded, ready, freed, end = args
    refs = dict(zip(names, refs, strict=True))
    role, computing = lax.axis_index("role"), plan.side_by_side * plan.columns
    # The last thread block may have one item fewer.
    present = _item(plan) < plan.items if plan.items % plan.side_by_side else True
    load = functools.partial(_load, plan, values, refs, buffers["stages"], loaded)

    @pl.when(role < computing)
    def _():
        plgpu.set_max_registers(plan.registers[0], action="increase")

        def wait(i):
            stage = _stage(plan, i)
            plgpu.barrier_wait(loaded.at[stage])
            computed = ("scores",) if plan.score_tiles else ()
            tile = {x: r.at[stage] for x, r in buffers["stages"].items() if x not in computed}
            if plan.score_tiles:
                tile["scores"] = buffers["stages"]["scores"].at[_score_tile(plan, i)]
            tile[values] = buffers["stages"][values].at[stage, _column(plan)]
            return tile | own()

        def own():
            # Recomputed wherever they are needed, see `lanes.zero`.
            return {x: ref.at[lax.axis_index("role")] for x, ref in buffers["own"].items()}

        def wait_scores(i):
            if plan.score_tiles:
                plgpu.barrier_wait(ready.at[_score_tile(plan, i)])

        def free(i):
            plgpu.barrier_arrive(freed.at[_stage(plan, i)])

        @pl.when(present)
        def _():
            batch, head, _ = _place(plan)
            columns = pl.ds(plane(plan) * WIDTH, WIDTH)
            walk(plan, refs, own, Turns(wait, wait_scores, free), batch, head, columns)

        plgpu.barrier_arrive(end)

    @pl.when(role >= computing)
    def _():
        plgpu.set_max_registers(plan.registers[1], action="decrease")
        pl.when(present)(lambda: _serve(plan, load, buffers["stages"], (loaded, ready, freed)))
        # Producers stay: a warpgroup that leaves while another still multiplies faults.
        plgpu.barrier_wait(end)


def launch(
    name: str, plan: Plan, walk, inputs: dict, outputs: dict, own: dict,
    *, values: str, barriers: bool = True, interpret,
):  # fmt: skip
    """Run `walk` in every consumer warpgroup.

    Args:
        name: Name of the kernel in profiles.
        plan: The launch.
        walk: `(plan, refs, own, turns, batch, head, columns)`, where `own` returns the tiles of
            that name, and chunks are counted in the order of the walk.
        inputs: Arrays by name; `q`, `k`, the values, the inverse and the vectors are loaded.
        outputs: Shapes by name.
        own: Scratch of each consumer warpgroup: shapes of tiles by name.
        values: The input `[B, T, HV, V]` whose columns are shared out.
        barriers: Whether the compiler orders the accesses to shared memory of a warpgroup; it
            puts a barrier around each.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        Arrays by the names of `outputs`.
    """
    names = (*inputs, *outputs)
    computing, items = plan.side_by_side * plan.columns, plan.side_by_side
    tile = functools.partial(smem.tile, computing, dtype=plan.shape.dtype)
    buffers = {"stages": _stages(plan, values), "own": {x: tile(*s) for x, s in own.items()}}
    copies = len(plan.key_tiles + plan.pair_tiles + plan.vectors) + plan.columns
    kernel = plgpu.kernel(
        launches.named(name, functools.partial(_body, plan, walk, values, names)),
        out_type=tuple(outputs.values()),
        scratch_types=(
            buffers,
            plgpu.Barrier(num_arrivals=copies, num_barriers=items * plan.stages),
            plgpu.Barrier(num_barriers=items * (plan.score_tiles or 1)),
            plgpu.Barrier(num_arrivals=plan.columns, num_barriers=items * plan.stages),
            plgpu.Barrier(num_arrivals=computing),
        ),
        grid=(-(-plan.items // items),),
        grid_names=("program",),
        num_threads=computing + items,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not barriers
        ),
        interpret=interpret,
    )
    return dict(zip(outputs, kernel(*inputs.values()), strict=True))
