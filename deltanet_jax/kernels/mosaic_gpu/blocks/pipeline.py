"""Rings of stages in shared memory, roles of warpgroups, and the loop of a persistent kernel."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref

__all__ = ["Ring", "Role", "Share", "Stage", "run_roles", "unravel"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a ring.

    A producer acquires it, fills it and commits it; loads commit by themselves, when all of them
    have arrived. A consumer waits for it, reads it and releases it.
    """

    index: Index
    full: Ref  # barriers
    empty: Ref

    def acquire(self) -> None:
        """Wait until the consumers have released what the stage held before."""
        plgpu.barrier_wait(self.empty)

    def load(self, source: Ref, tile: Ref) -> None:
        """Start a load into a tile of the stage."""
        plgpu.copy_gmem_to_smem(source, tile, self.full)

    def commit(self) -> None:
        """Hand over what was stored in the stage."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.full)

    def wait(self) -> None:
        """Wait until the stage is filled."""
        plgpu.barrier_wait(self.full)

    def release(self) -> None:
        """Let the producer fill the stage again."""
        plgpu.barrier_arrive(self.empty)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages of shared memory that the items of a sequence take in turn.

    A ring without `empty` barriers is released with another one, or by a barrier of all warps.
    """

    stages: int
    full: Ref
    empty: Ref = None
    first: Callable[[], Index] = lambda: 0  # of the stages, among those of several rings

    def stage(self, i: Index) -> Stage:
        """Return the stage of the i-th item; its index is computed anew each time."""
        return self.at(self.first() * self.stages + lax.rem(i, self.stages))

    def at(self, index: Index) -> Stage:
        """Return a stage by its index."""
        empty = None if self.empty is None else self.empty.at[index]
        return Stage(index, self.full.at[index], empty)


class Role(NamedTuple):
    """Some warpgroups of a thread block that do the same, with as many registers a thread."""

    warpgroups: int
    registers: int
    body: Callable[[], None]


def run_roles(*roles: Role) -> None:
    """Run two roles, or more of one warpgroup each, in the order of warpgroups.

    The last role serves the others and gives them registers. A warpgroup that leaves while another
    still multiplies faults: the bodies of one that does not multiply wait for the others.
    """
    warpgroup = lax.axis_index("role")
    for i, role in enumerate(roles):
        last = i == len(roles) - 1
        if len(roles) > 2:
            assert role.warpgroups == 1
            mine = warpgroup == i
        else:
            others = roles[0].warpgroups
            mine = warpgroup >= others if last else warpgroup < others

        def run(role: Role = role, *, last: bool = last) -> None:
            plgpu.set_max_registers(role.registers, action="decrease" if last else "increase")
            role.body()

        pl.when(mine)(run)


@dataclasses.dataclass(frozen=True)
class Share:
    """The items of a thread block of a persistent kernel: every `programs`-th one."""

    items: int  # of all thread blocks
    programs: int
    program: Index = dataclasses.field(default_factory=lambda: lax.axis_index("program"))

    @property
    def rounds(self) -> Index:
        """Number of items of this thread block."""
        return lax.div(self.items - self.program + self.programs - 1, self.programs)

    def item(self, i: Index) -> Index:
        """Return the i-th item of this thread block."""
        return self.program + i * self.programs


def unravel(item: Index, size: int, *sizes: int) -> tuple[Index, ...]:
    """Return the coordinates of a work item; the last one runs fastest.

    There is one coordinate more than sizes: the first has none.
    """
    coordinates: list[Index] = []
    for other in reversed(sizes):
        coordinates.append(lax.rem(item, other))
        item = lax.div(item, other)
    return (lax.div(item, size), lax.rem(item, size), *reversed(coordinates))
