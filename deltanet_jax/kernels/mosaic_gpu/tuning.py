"""How every Hopper kernel is cut, staged and given registers: one table, and the SMs of a chip."""

from typing import NamedTuple

import jax

from deltanet_jax.core.problem import GateKind
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = [
    "HOPPER",
    "ROWS",
    "SMS_OF_H200",
    "Call",
    "Config",
    "Row",
    "config_of",
    "find_config",
    "sm_count",
]

SMS_OF_H200 = 132
HOPPER = "sm_90"


class Config(NamedTuple):
    """How a kernel runs; a kernel reads the fields that it has a use for."""

    # Per thread of a consumer and of a producer warpgroup, or of every warpgroup of a thread
    # block. The sum over warpgroups is at most 512 (504 for three).
    registers: tuple[int, ...] = ()
    warpgroups: int = 1  # of a thread block, each on chunks of its own
    residents: int = 1  # thread blocks of a persistent kernel that share an SM
    columns: int = 1  # consumer warpgroups of an item of work, on 64 columns of V each
    items: int = 1  # of work in a thread block: four warpgroups can divide an SM unevenly
    stages: int = 1  # chunks of an item in shared memory
    value_stages: int = 1  # chunks of values, where these have stages of their own
    scores: int = 1  # tiles of the scores that are computed on the way
    width: int = 64  # channels or columns at a time


class Call(NamedTuple):
    """Properties of a call that a configuration depends on."""

    kernel: str
    key_dim: int
    value_dim: int
    gate: GateKind
    delta: bool
    save: bool  # whether what the backward reads is stored
    full: bool  # whether the work fills the SMs, as each kernel counts it
    chip: str


class Row(NamedTuple):
    """Calls that run alike; `None` stands for any value."""

    kernel: str
    key_dim: int | None
    config: Config
    value_dim: int | None = None
    gate: GateKind | None = None
    delta: bool | None = None
    save: bool | None = None
    full: bool | None = None
    chip: str = HOPPER

    def covers(self, call: Call) -> bool:
        """Whether the row holds for a call."""
        wanted = self._asdict()
        return all(wanted[name] in (None, x) for name, x in call._asdict().items())


# Registers of the recurrent kernels. All that a thread can have is slower than `ALONE`, but where
# that would spill.
ALONE, ALL, PAIR, TWO, MAPS = (248, 152), (256, 152), (200, 104), (168, 88), (232, 40)
ONE_64 = Config(ALONE, stages=2, scores=2)
TWO_64 = Config(TWO, items=2, stages=2, scores=2)
ONE_128 = Config(ALONE, stages=3, scores=2, width=128)
PAIR_128 = Config(PAIR, columns=2, stages=2, scores=2)
MAPS_128 = Config(MAPS, stages=3, width=128)


def _with_fewer_stages(*rows: Row) -> tuple[Row, ...]:
    """Give a vector gate, which loads more, two stages where others have three."""
    all_rows: list[Row] = []
    for row in rows:
        if row.config.stages == 3:
            all_rows += [row._replace(gate="vector", config=row.config._replace(stages=2))]
        all_rows += [row]
    return tuple(all_rows)


# The first row that covers a call holds.
#
# In the recurrent kernels, `full` means more parts of 64 columns of V than SMs. There two consumers
# share the loads of an item; otherwise a warpgroup alone on its SM is faster. At K = 256 shared
# memory holds one. At K = 64 two items share a thread block, but for the residuals and the backward
# of the delta rule with a vector gate, for which shared memory does not hold two.
RECURRENT = _with_fewer_stages(
    Row("run_states", 64, ONE_64, value_dim=64, full=False),
    Row("run_states", 64, ONE_64, value_dim=64, gate="vector", delta=True, save=True),
    Row("run_states", 64, TWO_64, value_dim=64),
    Row("run_states", 64, ONE_64, full=False),
    Row("run_states", 64, PAIR_128._replace(stages=3)),
    Row("run_states", 128, ONE_128, value_dim=64),
    Row("run_states", 128, ONE_128, full=False),
    Row("run_states", 128, PAIR_128, save=True),
    Row("run_states", 128, PAIR_128._replace(stages=3)),
    Row("run_states", 256, Config(ALL, stages=2), gate="scalar", save=True),
    Row("run_states", 256, Config(ALONE, stages=2)),
    Row("reverse_states", 64, ONE_64, value_dim=64, full=False),
    Row("reverse_states", 64, ONE_64, value_dim=64, gate="vector", delta=True),
    Row("reverse_states", 64, TWO_64, value_dim=64),
    Row("reverse_states", 64, ONE_64, full=False),
    Row("reverse_states", 64, PAIR_128._replace(stages=3)),
    Row("reverse_states", 128, ONE_128, value_dim=64),
    Row("reverse_states", 128, ONE_128, full=False),
    Row("reverse_states", 128, PAIR_128),
    Row("reverse_states", 256, Config(ALONE, stages=2)),
    Row("state_maps", 64, Config(MAPS, stages=2), full=False),
    Row("state_maps", 64, TWO_64),
    Row("state_maps", 128, MAPS_128, value_dim=64),
    Row("state_maps", 128, MAPS_128, full=False),
    Row("state_maps", 128, Config(MAPS, columns=2, stages=3)),
    Row("state_maps", 256, Config(MAPS, stages=2)),
)
FUSED = Config(stages=4, value_stages=3)
ROWS = (
    *RECURRENT,
    # The forward with its inverses, which residuals leave no registers for.
    Row(
        "run_states_fused", 128, FUSED._replace(registers=(184, 72), columns=2),
        value_dim=128, delta=True, save=False, full=True,
    ),
    Row(
        "run_states_fused", 64, FUSED._replace(registers=TWO, items=2),
        value_dim=64, delta=True, save=False, full=True,
    ),
    Row("chunk_inverses", 64, Config(residents=6)),
    Row("chunk_inverses", 128, Config(residents=5)),
    Row("chunk_inverses", 256, Config(residents=3)),
    # A thread of three warpgroups has 168 registers, of two 255. The overlaps and the inverse need
    # more than 168: at (8, 4096, 16, 128) three spilled over 400 bytes and took 0.637 ms on an H200
    # where two took 0.484; two take 0.402, or less, since the inverse needs less. Without them
    # three spill 8 bytes and take 0.257.
    Row("decayed_chunks", None, Config(warpgroups=2), delta=True),
    Row("decayed_chunks", None, Config(warpgroups=3)),
    # One warpgroup for `dq` and states, one for `dk`, one that loads.
    Row("chunk_gradients", None, Config((232, 240, 32), width=128)),
    # The work is full where parts of 32 columns of the state have a thread block for every SM.
    Row("decode", None, Config(width=32), full=True),
    Row("decode", None, Config(width=16)),
)  # fmt: skip


def config_of(
    kernel: str, shape: Shape, *, save: bool = False, full: bool = True, chip: str = HOPPER
) -> Config:
    """Return the configuration of a kernel for a call that it covers.

    Raises:
        NotImplementedError: If no row does.
    """
    config = find_config(kernel, shape, save=save, full=full, chip=chip)
    if config is None:
        raise NotImplementedError(f"`{kernel}` has no configuration for {shape} on {chip}")
    return config


def find_config(
    kernel: str, shape: Shape, *, save: bool = False, full: bool = True, chip: str = HOPPER
) -> Config | None:
    """Return the configuration of a kernel for a call, or `None` if no row covers it."""
    dims = shape.key_dim, shape.value_dim
    call = Call(kernel, *dims, shape.gate, shape.delta, save, full, chip)
    return next((row.config for row in ROWS if row.covers(call)), None)


def sm_count() -> int:
    """Return the number of SMs of the GPU that a call is traced for.

    A device that is only described says it itself: the abstract device of the mesh that is set.
    Else it is the number of the GPU in this machine. Without one it is an H200's, so that the
    interpreter cuts a call as that GPU would.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.num_cores is not None:
        return int(described.num_cores)
    if jax.default_backend() != "gpu":
        return SMS_OF_H200
    return int(getattr(jax.devices()[0], "core_count", SMS_OF_H200))
