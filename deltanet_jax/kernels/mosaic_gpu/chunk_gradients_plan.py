"""Static values of a launch of `chunk_gradients`, and the positions of its work items."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from deltanet_jax.kernels.mosaic_gpu import state_planes
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.tuning import sm_count

__all__ = ["Place", "Plan"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch; an item of work is a run of chunks and a block of K."""

    shape: Shape
    interpret: bool
    scale: float

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
        return min(self.shape.key_dim, 128)

    @property
    def value_block(self) -> int:
        return min(self.shape.value_dim, 128)

    @property
    def key_blocks(self) -> int:
        return self.shape.key_dim // self.key_block

    @property
    def value_blocks(self) -> int:
        return self.shape.value_dim // self.value_block

    @property
    def planes(self) -> tuple[tuple[str, ...], ...]:
        """Planes of the state gradients, for every block of V."""
        names, each = (
            state_planes.planes_of(self.shape.value_dim),
            self.value_block // state_planes.WIDTH,
        )
        return tuple(names[i : i + each] for i in range(0, len(names), each))

    @property
    def vectors(self) -> tuple[str, ...]:
        """Vectors to load; row and column views of one want two copies."""
        return ("beta", "beta_column") * self.shape.delta + (
            "b",
            "b_column",
        ) * self.shape.scalar_gate

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
    def keys(self) -> str:
        """The tile of the keys that the tiles of pairs multiply."""
        return "beta_k" if self.weighs_keys else "k"

    @property
    def in_place(self) -> dict[str, str]:
        """The gradients that take the place of a plane, which only their own item reads."""
        return dict(zip(("dq", "dk"), state_planes.planes_of(self.shape.value_dim), strict=False))

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
    def barriers(self) -> dict[int, tuple[str, ...]]:
        """Names of barriers, by the arrivals that each waits for.

        Loads arrive where their tile is named, both warpgroups where they free some, and one of
        them where it is `ready`, or is `free` of, the tile of `Y`, or has `read` a state or `made`
        the next.
        """
        arrivals = dict.fromkeys(("dv", "state", "ready", "free", "read", "made"), 1)
        arrivals |= dict.fromkeys(("values", "keys"), 2) | {"dstate": len(self.planes[0])}
        arrivals |= dict.fromkeys(("freed_values", "freed_state", "freed_keys"), 2)
        arrivals |= dict.fromkeys(self.vectors[::2], 2)
        return {
            count: tuple(name for name, own in arrivals.items() if own == count)
            for count in sorted(set(arrivals.values()))
        }

    def locate(self, item):
        """Batch, run, head and block of K of one work item."""
        block, item = lax.rem(item, self.key_blocks), lax.div(item, self.key_blocks)
        head, item = lax.rem(item, self.shape.heads), lax.div(item, self.shape.heads)
        return lax.div(item, self.runs), lax.rem(item, self.runs), head, block

    def length(self, item):
        """Chunks of one work item; the last run of a sequence may be shorter than the others."""
        short = self.shape.chunks % self.stride
        if short == 0:
            return self.stride
        _, run, _, _ = self.locate(item)
        return jnp.where(run == self.runs - 1, short, self.stride)


class Place(NamedTuple):
    """A chunk of a work item: of one run, head and block of K."""

    item: Any
    turn: Any  # chunks of the item before it
    step: Any  # chunks of the thread block before it
    stored: Any  # whether its state is; otherwise it is recomputed from the chunk before
    last: Any  # whether the next chunk is of another item

    def locate(self, plan: Plan):
        """Batch, chunk, head and block of K."""
        batch, run, head, block = plan.locate(self.item)
        return batch, run * plan.stride + self.turn, head, block
