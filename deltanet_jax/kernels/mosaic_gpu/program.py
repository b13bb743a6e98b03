"""Common parts of the two recurrent kernels: heads and columns of a thread block, and loads.

An item of work is the chunks of one head. Columns of V never meet, so each warpgroup owns 64 of
them and shares `q`, `k` and the inverse with the others of its item; one more warpgroup issues
loads, one or two chunks ahead, and computes the scores of each chunk. Most thread blocks have one
item, those of small heads two, which share an SM and nothing else.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import pairs, state_planes
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, launches, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.pipeline import Ring, Role, run_roles, unravel
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.tuning import Config, config_of, sm_count

__all__ = [
    "WIDTH",
    "Inputs",
    "Own",
    "Pipeline",
    "Place",
    "Plan",
    "fill_rounds",
    "fills",
    "launch",
    "plane",
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
    def config(self) -> Config:
        """How the kernel runs."""
        kernel = "state_maps" if self.map_dim else "run_states"
        if self.reverse:
            kernel = "reverse_states"
        full = fills(self.shape, self.shape.value_dim + self.map_dim)
        return config_of(kernel, self.shape, save=self.save, full=full)

    @property
    def slices(self) -> int:
        return (self.shape.value_dim + self.map_dim) // (self.config.columns * WIDTH)

    @property
    def items(self) -> int:
        return self.shape.batch * self.shape.heads * self.slices

    @property
    def stride(self) -> int:
        """Stride of the chunks whose incoming state is stored."""
        return state_planes.stride(self.shape)

    def own_tile(self, *shape: int) -> Ref:
        """Return the type of a tile that every consumer warpgroup has."""
        return smem.tile(self.config.items * self.config.columns, *shape, dtype=self.shape.dtype)

    @property
    def rows(self) -> tuple[Any, ...]:
        """The blocks of rows of the state."""
        return tuple(pl.ds(i, CHUNK) for i in range(0, self.shape.key_dim, CHUNK))

    @property
    def key_blocks(self) -> tuple[Any, ...]:
        """The blocks of columns of the transposed state."""
        width = self.config.width
        return tuple(pl.ds(i, width) for i in range(0, self.shape.key_dim, width))

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
        """Tiles for `tril(D * (q k^T))` where it is computed."""
        return 0 if self.map_dim or self.shape.vector_gate else self.config.scores


class Inputs(NamedTuple):
    """Arrays that both recurrent kernels read, or tiles of a chunk of them.

    `None` stands for what a call has none of, or does not load.
    """

    v: Ref = None  # [B, T, HV, V]; in `run_states`
    do: Ref = None  # gradient of the outputs, [B, T, HV, V]; in `reverse_states`
    q: Ref = None  # [B, T, H, K]; decayed by a vector gate, as `k` and `writes`
    k: Ref = None  # the keys that read and, unless there are `writes`, write
    inverse: Ref = None  # [B, N, HV, C, C]
    beta: Ref = None  # [B, N, HV, C], as the following four
    b: Ref = None
    b_column: Ref = None  # `b` again: row and column views of one vector need a tile each
    decay: Ref = None
    rest: Ref = None
    writes: Ref = None  # [B, T, HV, K]
    scores: Ref = None  # [B, N, HV, C, C]; as tiles, computed where they are not loaded
    kept: Ref = None  # [B, N, HV, K]
    state: Ref = None  # that enters the first chunk of the walk, [B, HV, K, V] float32

    @property
    def values(self) -> Ref:
        """The array whose columns are shared out to the warpgroups."""
        return self.do if self.v is None else self.v

    @property
    def writing(self) -> Ref:
        """The keys that write."""
        return self.k if self.writes is None else self.writes

    @property
    def of_tokens(self) -> tuple[Ref, ...]:
        """Arrays with a row for every token of a key head."""
        return self.k, self.writes, self.q

    @property
    def of_chunks(self) -> tuple[Ref, ...]:
        """Arrays with an entry for every chunk of a value head."""
        vectors = (self.beta, self.b, self.b_column, self.decay, self.rest, self.kept)
        return (self.inverse, self.scores, *vectors)


class Own(NamedTuple):
    """Tiles of one consumer warpgroup; each kernel has some of them."""

    dv: Ref = None
    error: Ref = None
    o: Ref = None
    state: Ref = None
    u: Ref = None


class Place(NamedTuple):
    """Batch, head and columns of V of one consumer warpgroup."""

    batch: Index
    head: Index
    columns: Any


Walk = Callable[[Plan, Inputs, Any, Callable[[], Own], "Pipeline", Place], None]
Results = TypeVar("Results")


class Pipeline(NamedTuple):
    """Pipeline between a consumer warpgroup and its producers, for the i-th chunk."""

    wait: Callable[[Any], tuple[Inputs, Own]]  # until it is loaded; returns its tiles
    wait_scores: Callable[[Any], None]  # once a chunk
    release: Callable[[Any], None]  # all of its tiles
    # Where the inverse is computed in the same thread block:
    wait_inverse: Callable[[Any], None] = lambda i: None
    release_inverse: Callable[[Any], None] = lambda i: None  # and `q`
    stored: Callable[[Any], None] = lambda i: None  # the outputs of the chunk before are


def fills(shape: Shape, columns: int) -> bool:
    """Whether each head's columns have more consumer warpgroups than there are SMs."""
    return shape.batch * shape.heads * columns // WIDTH > sm_count()


def fill_rounds(programs: int) -> bool:
    """Whether thread blocks, one to an SM, leave at most a fifth of the waves idle."""
    rounds = -(-programs // sm_count())
    return 5 * programs >= 4 * rounds * sm_count()


def _stages(plan: Plan, inputs: Inputs) -> Inputs:
    """Return the types of the tiles of all stages."""
    shape, stages = plan.shape, plan.config.items * plan.config.stages
    tile = functools.partial(smem.tile, dtype=shape.dtype)
    keys, pairs = tile(stages, CHUNK, shape.key_dim), tile(stages, CHUNK, CHUNK)
    values = tile(stages, plan.config.columns, CHUNK, WIDTH)
    scores = pairs if shape.vector_gate and not plan.map_dim else None
    if plan.score_tiles:
        scores = tile(plan.config.items * plan.score_tiles, CHUNK, CHUNK)

    def vector(x: jax.Array | None, size: int = CHUNK) -> Ref:
        return None if x is None else plgpu.SMEM((stages, size), jnp.float32)

    return Inputs(
        q=None if plan.map_dim else keys,
        k=None if shape.vector_gate and not shape.delta else keys,
        v=None if inputs.v is None else values,
        do=None if inputs.do is None else values,
        inverse=pairs if shape.delta else None,
        beta=vector(inputs.beta),
        b=vector(inputs.b),
        b_column=vector(inputs.b_column),
        decay=vector(inputs.decay),
        rest=vector(inputs.rest),
        writes=None if inputs.writes is None else keys,
        scores=scores,
        kept=vector(inputs.kept, shape.key_dim),
    )


def _loads(inputs: Inputs, stages: Inputs) -> tuple[list[tuple[Ref, Ref]], list[tuple[Ref, Ref]]]:
    """Pairs of what is loaded and its tiles: those of tokens, and those of chunks."""

    def both(x: tuple[Ref, ...], y: tuple[Ref, ...]) -> list[tuple[Ref, Ref]]:
        pairs = zip(x, y, strict=True)
        return [(a, b) for a, b in pairs if a is not None and b is not None]

    of_chunks = both(inputs.of_chunks, stages.of_chunks)
    return both(inputs.of_tokens, stages.of_tokens), of_chunks


def _seat(plan: Plan) -> Index:
    """Return the place of this warpgroup's item in its thread block.

    Recomputed wherever it is needed, see `lanes.zero`.
    """
    if plan.config.items == 1:
        return 0
    return lax.rem(lax.axis_index("role"), plan.config.items)


def _item(plan: Plan) -> Index:
    return lax.axis_index("program") * plan.config.items + _seat(plan)


def _place(plan: Plan) -> tuple[Index, Index, Index]:
    """Batch, head and first columns of V of this warpgroup's item."""
    row, part = lax.div(_item(plan), plan.slices), lax.rem(_item(plan), plan.slices)
    batch, head = unravel(row, plan.shape.heads)
    return batch, head, part * plan.config.columns


def _column(plan: Plan) -> Index:
    """Return the place of this warpgroup's columns of V among those of its item."""
    return lax.rem(lax.axis_index("role"), plan.config.columns)


def plane(plan: Plan) -> Index:
    """Return the place of this warpgroup's columns of V among those of its head."""
    return _place(plan)[2] + _column(plan)


def _load(plan: Plan, refs: Inputs, stages: Inputs, chunks: Ring, i: Index) -> None:
    """Issue the loads of the i-th chunk."""
    batch, head, first = _place(plan)
    stage = chunks.stage(i)
    chunk = plan.shape.chunks - 1 - i if plan.reverse else i

    def copy(source: Ref, tile: Ref, *index: Any, part: tuple[int, ...] = ()) -> None:
        stage.load(source.at[index], tile.at[(stage.index, *part)])

    tokens = pl.ds(chunk * CHUNK, CHUNK)
    of_tokens, of_chunks = _loads(refs, stages)
    for source, tile in of_tokens:
        copy(source, tile, batch, tokens, lax.div(head, plan.group))
    for j in range(plan.config.columns):
        # A map has no values; it loads some and drops them.
        start = lax.rem((first + j) * WIDTH, plan.shape.value_dim)
        copy(refs.values, stages.values, batch, tokens, head, pl.ds(start, WIDTH), part=(j,))
    for source, tile in of_chunks:
        copy(source, tile, batch, chunk, head)


def _serve(
    plan: Plan, load: Callable[[Index], None], stages: Inputs, chunks: Ring, scores: Ring
) -> None:
    """Produce: load every chunk and compute its scores."""
    ahead = plan.config.stages - 1

    def pair(i: Index) -> None:
        stage = chunks.stage(i)
        stage.wait()
        operands = (stages.q, stages.k, stages.b, stages.b_column)
        tiles = launches.at(operands, lambda: stage.index)
        x = pairs.scores(*tiles, interpret=plan.interpret).astype(plan.shape.dtype)
        made = scores.stage(i)
        stages.scores.at[made.index][...] = x
        made.commit()

    def step(i: Index, _: None) -> None:
        # With two tiles the scores are ready before their chunk begins.
        if plan.score_tiles == 2:
            pair(i)
        following = chunks.stage(i + ahead)
        pl.when(i > 0)(following.acquire)
        pl.when(i + ahead < plan.shape.chunks)(lambda: load(i + ahead))
        if plan.score_tiles == 1:
            pair(i)

    for i in range(min(ahead, plan.shape.chunks)):
        load(i)
    lax.fori_loop(0, plan.shape.chunks, step, None)
    last = plan.shape.chunks - 1 + lanes.zero(interpret=plan.interpret)
    chunks.stage(last).acquire()


def _body(
    plan: Plan,
    walk: Walk,
    refs: Inputs,
    out: Any,
    own_tiles: Own,
    stages: Inputs,
    loaded: Ref,
    ready: Ref,
    freed: Ref,
    end: Ref,
) -> None:
    # The last thread block may have one item fewer.
    present = _item(plan) < plan.items if plan.items % plan.config.items else True
    seat = functools.partial(_seat, plan)
    chunks = Ring(plan.config.stages, loaded, freed, seat)
    scores = Ring(plan.score_tiles, ready, first=seat)  # released with their chunk

    def own() -> Own:
        # Recomputed wherever they are needed, see `lanes.zero`.
        return launches.at(own_tiles, lambda: lax.axis_index("role"))

    def wait(i: Index) -> tuple[Inputs, Own]:
        stage = chunks.stage(i)
        stage.wait()
        tile = launches.at(stages._replace(v=None, do=None), lambda: stage.index)
        if plan.score_tiles:
            tile = tile._replace(scores=stages.scores.at[scores.stage(i).index])
        values = stages.values.at[stage.index, _column(plan)]
        return tile._replace(do=values) if plan.reverse else tile._replace(v=values), own()

    def wait_scores(i: Index) -> None:
        if plan.score_tiles:
            scores.stage(i).wait()

    def consume() -> None:
        @pl.when(present)
        def _() -> None:
            batch, head, _ = _place(plan)
            place = Place(batch, head, pl.ds(plane(plan) * WIDTH, WIDTH))
            pipeline = Pipeline(wait, wait_scores, lambda i: chunks.stage(i).release())
            walk(plan, refs, out, own, pipeline, place)

        plgpu.barrier_arrive(end)

    def produce() -> None:
        load = functools.partial(_load, plan, refs, stages, chunks)
        pl.when(present)(lambda: _serve(plan, load, stages, chunks, scores))
        plgpu.barrier_wait(end)

    config = plan.config
    run_roles(
        Role(config.items * config.columns, config.registers[0], consume),
        Role(config.items, config.registers[1], produce),
    )


def launch(
    name: str,
    plan: Plan,
    walk: Walk,
    inputs: Inputs,
    outputs: Results,
    own: Own,
    *,
    automatic_barriers: bool,
    interpret: object,
) -> Results:
    """Run `walk` in every consumer warpgroup.

    Args:
        name: Name of the kernel in profiles.
        plan: The launch.
        walk: `(plan, refs, out, own, pipeline, place)`, where `own` returns the tiles of that name,
            and chunks are counted in the order of the walk.
        inputs: Arrays; all but the state are loaded.
        outputs: Record of the types of the results.
        own: Types of the tiles of all consumer warpgroups, by `own_tile`.
        automatic_barriers: As in `launches.launch`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The results, in the record of `outputs`.
    """
    computing, items = plan.config.items * plan.config.columns, plan.config.items
    stages = _stages(plan, inputs)
    copies = sum(map(len, _loads(inputs, stages))) + plan.config.columns
    return launches.launch(
        name,
        functools.partial(_body, plan, walk),
        inputs,
        outputs,
        own,
        stages,
        plgpu.Barrier(num_arrivals=copies, num_barriers=items * plan.config.stages),
        plgpu.Barrier(num_barriers=items * (plan.score_tiles or 1)),
        plgpu.Barrier(num_arrivals=plan.config.columns, num_barriers=items * plan.config.stages),
        plgpu.Barrier(num_arrivals=computing),
        programs=-(-plan.items // items),
        warpgroups=computing + items,
        automatic_barriers=automatic_barriers,
        interpret=interpret,
    )
