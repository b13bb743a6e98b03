"""Static values, records and shared memory of `chunk_gradients`, and places of its work items."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import state_planes
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.pipeline import unravel
from deltanet_jax.kernels.mosaic_gpu.gate_vectors import GateParts
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.tuning import Config, config_of, sm_count

__all__ = ["Barriers", "Inputs", "Place", "Plan", "Results", "Scratch", "scratch_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch; an item of work is a run of chunks and a block of K."""

    shape: Shape
    interpret: bool
    scale: float

    @property
    def config(self) -> Config:
        """How the kernel runs."""
        return config_of("chunk_gradients", self.shape)

    @property
    def stride(self) -> int:
        """Stride of the chunks whose state is stored."""
        return state_planes.stride(self.shape)

    @property
    def programs(self) -> int:
        """Thread blocks of the persistent kernel: one for each SM."""
        return min(2 if self.interpret else sm_count(), self.items)

    @property
    def key_block(self) -> int:
        return min(self.shape.key_dim, self.config.width)

    @property
    def value_block(self) -> int:
        return min(self.shape.value_dim, self.config.width)

    @property
    def key_blocks(self) -> int:
        return self.shape.key_dim // self.key_block

    @property
    def value_blocks(self) -> int:
        return self.shape.value_dim // self.value_block

    @property
    def planes(self) -> int:
        """Planes of the state gradients in a block of V."""
        return self.value_block // state_planes.WIDTH

    @property
    def weighs_pairs(self) -> bool:
        """Whether the tiles of pairs contain `beta`."""
        return self.shape.delta and self.shape.dtype == jnp.bfloat16

    @property
    def halves(self) -> bool:
        """Whether tiles of pairs keep 16 bits of mantissa, as two tiles."""
        return self.weighs_pairs and self.shape.scalar_gate

    @property
    def weighs_keys(self) -> bool:
        """Whether the keys are multiplied by `beta`, which rounds once more."""
        return self.shape.delta and not self.weighs_pairs

    @property
    def runs(self) -> int:
        """Number of runs; a run is the chunks from one stored state to the next."""
        return -(-self.shape.chunks // self.stride)

    @property
    def items(self) -> int:
        return self.shape.batch * self.runs * self.shape.heads * self.key_blocks

    @property
    def places(self) -> tuple[int, ...]:
        """The leading axes of tiles: of one place, so that larger heads do not spill.

        Smaller ones do not anyway. See `lanes.zero`.
        """
        return (1,) if max(self.shape.key_dim, self.shape.value_dim) > 64 else ()

    @property
    def arrivals(self) -> "Barriers":
        """Arrivals that every barrier waits for."""
        delta, gated = self.shape.delta, self.shape.scalar_gate
        return Barriers(
            dv=1,
            state=1,
            ready=1,
            free=1,
            read=1,
            made=1,
            values=2,
            keys=2,
            dstate=self.planes,
            freed_values=2,
            freed_state=2,
            freed_keys=2,
            beta=2 if delta else None,
            b=2 if gated else None,
        )

    def locate(self, item: Index) -> tuple[Index, ...]:
        """Batch, run, head and block of K of one work item."""
        return unravel(item, self.runs, self.shape.heads, self.key_blocks)

    def length(self, item: Index) -> Index:
        """Chunks of one work item; the last run of a sequence may be shorter than the others."""
        short = self.shape.chunks % self.stride
        if short == 0:
            return self.stride
        _, run, _, _ = self.locate(item)
        return jnp.where(run == self.runs - 1, short, self.stride)


class Barriers(NamedTuple):
    """Loads arrive where their tile is named, and both warpgroups where they free some.

    One of them arrives where it is `ready`, or is `free` of, the tile of `Y`, or has `read` a
    state or `made` the next.
    """

    dv: Ref
    state: Ref
    ready: Ref
    free: Ref
    read: Ref
    made: Ref
    values: Ref
    keys: Ref
    dstate: Ref
    freed_values: Ref
    freed_state: Ref
    freed_keys: Ref
    beta: Ref
    b: Ref

    def types(self) -> dict[int, Ref]:
        """The barriers by their arrivals, given these numbers.

        Few barriers of many stages: the phases that a warpgroup counts are bits of one register.
        """
        return {
            count: plgpu.Barrier(num_arrivals=count, num_barriers=self.count(count))
            for count in sorted({count for count in self if count is not None})
        }

    def among(self, every: dict[int, Ref]) -> "Barriers":
        """The references to the barriers, given these numbers and references to `types`."""
        counts = list(self)
        stages = [counts[:i].count(count) for i, count in enumerate(counts)]
        refs = [
            None if count is None else every[count].at[stage]
            for count, stage in zip(counts, stages, strict=True)
        ]
        return Barriers(*refs)


class Inputs(NamedTuple):
    """Arrays that the kernel reads, beside the planes of the state gradients."""

    q: Ref
    k: Ref
    u: Ref
    do: Ref
    state: Ref
    dv: Ref
    beta: Ref
    beta_column: Ref  # `beta` again: row and column views of one vector need a tile each
    b: Ref
    b_column: Ref


class Results(NamedTuple):
    """Gradients, as the kernel stores them; where they are `None`, over planes or not at all."""

    dq: Ref  # [B, T, HV, K]
    dk: Ref  # [B, T, HV, K]
    dbeta: Ref  # [M, B, N, HV, C] float32, to be summed over the M blocks of K
    parts: GateParts | None


class Scratch(NamedTuple):
    """Shared memory of a thread block."""

    q: Ref
    k: Ref
    beta_k: Ref  # the keys times beta, where tiles of pairs do not contain it
    u: Ref
    do: Ref
    dv: Ref
    state: Ref
    dstate: Ref
    dq: Ref
    dk: Ref
    x: tuple[Ref, ...]  # tiles whose sum is `X`; as of `Y`
    y: tuple[Ref, ...]
    dbeta: Ref
    diagonal: Ref
    db_q: Ref
    db_k: Ref
    overlap: Ref
    db_write: Ref
    beta: Ref
    beta_column: Ref
    b: Ref
    b_column: Ref

    @property
    def weighed(self) -> Ref:
        """The keys that the tiles of pairs multiply."""
        return self.k if self.beta_k is None else self.beta_k


class Place(NamedTuple):
    """A chunk of a work item: of one run, head and block of K."""

    item: Index
    turn: Index  # chunks of the item before it
    step: Index  # chunks of the thread block before it
    stored: Any  # whether its state is; otherwise it is recomputed from the chunk before
    last: Any  # whether the next chunk is of another item

    def locate(self, plan: Plan) -> tuple[Index, Index, Index, Index]:
        """Batch, chunk, head and block of K."""
        batch, run, head, block = plan.locate(self.item)
        return batch, run * plan.stride + self.turn, head, block


def scratch_of(plan: Plan) -> Scratch:
    """Return the types of the shared memory."""
    delta, gated = plan.shape.delta, plan.shape.scalar_gate
    tile = functools.partial(smem.tile, *plan.places, dtype=plan.shape.dtype)
    keys, values = tile(CHUNK, plan.key_block), tile(CHUNK, plan.value_block)
    pairs = (tile(CHUNK, CHUNK),) * (2 if plan.halves else 1)
    vector, two = (plgpu.SMEM((*n, CHUNK), jnp.float32) for n in (plan.places, (2,)))
    # Two of each: `beta` of one item is still read when the next item's values arrive.
    beta, b = two if delta else None, two if gated else None
    part = vector if gated else None
    return Scratch(
        q=keys,
        k=keys,
        beta_k=keys if plan.weighs_keys else None,
        u=values,
        do=values,
        dv=values if delta else None,
        state=tile(plan.key_block, plan.value_block),
        dstate=tile(plan.value_block, plan.key_block),
        dq=keys,
        dk=keys,
        x=pairs if delta else (),
        y=pairs,
        dbeta=vector if delta else None,
        diagonal=vector if delta else None,
        db_q=part,
        db_k=part,
        overlap=part,
        db_write=part,
        beta=beta,
        beta_column=beta,
        b=b,
        b_column=b,
    )
