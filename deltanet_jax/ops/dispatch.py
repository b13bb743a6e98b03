"""The implementations: one table, and the choice among its rows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import AxisType

from deltanet_jax.core.problem import Problem
from deltanet_jax.kernels.partition import mesh_of, over_devices
from deltanet_jax.ops.associative import (
    associative,
    associative_chunks,
    numbers_in_chunk_maps,
)
from deltanet_jax.ops.chunkwise import chunkwise, chunkwise_solve
from deltanet_jax.ops.recurrent import recurrent

__all__ = [
    "IMPLEMENTATIONS",
    "Algorithm",
    "Implementation",
    "Row",
    "check_name",
    "choose",
    "choose_for_one_token",
    "is_on_default_platform",
    "reason_against",
    "run",
]

Algorithm = Callable[[Problem, int | None], tuple[jax.Array, jax.Array]]
Implementation = str | Algorithm
WhyNot = Callable[[Problem, int | None], str | None]

FEW_NUMBERS = 2**25  # in chunk maps up to which a GPU scans them: 1.3 GB in training
# Keys and values that form 2 prepares together on a GPU, where each serial step costs launches:
# 4 GB in training.
PREPARED_ON_A_GPU = 2**27
KERNEL_PLATFORMS = ("gpu", "tpu")


class Kernels(Protocol):
    """Interface of a package of kernels."""

    def why_not(self, problem: Problem, chunk_size: int | None) -> str | None: ...

    def chunkwise(
        self, problem: Problem, chunk_size: int | None = None, *, interpret: bool = False
    ) -> tuple[jax.Array, jax.Array]: ...


def _kernels(platform: str) -> Kernels:
    """Load the kernels of a platform; elsewhere those for TPUs, which their interpreter runs.

    Loaded here and not with the package: Pallas costs a program that needs no kernel a second.
    """
    if platform == "gpu":
        from deltanet_jax.kernels import mosaic_gpu

        return mosaic_gpu
    from deltanet_jax.kernels import mosaic_tpu

    return mosaic_tpu


def _pallas(problem: Problem, chunk_size: int | None) -> tuple[jax.Array, jax.Array]:
    """Run the kernels of this platform; elsewhere the TPU kernel in the interpreter."""
    platform = _platform(problem)
    run_kernels = _kernels(platform).chunkwise
    interpret = platform not in KERNEL_PLATFORMS
    return over_devices(lambda x: run_kernels(x, chunk_size, interpret=interpret), problem)


def _pallas_why_not(problem: Problem, chunk_size: int | None) -> str | None:
    reason = _kernels(_platform(problem)).why_not(problem, chunk_size)
    elsewhere = _not_its_hardware(problem)
    return reason if reason is None or elsewhere is None else f"{elsewhere}; {reason}"


def _not_its_hardware(problem: Problem) -> str | None:
    platform = _platform(problem)
    if platform in KERNEL_PLATFORMS:
        return None
    return f"the kernels need a Hopper GPU or a TPU; this is a {platform}"


def _chunkwise(problem: Problem, chunk_size: int | None) -> tuple[jax.Array, jax.Array]:
    """Form 2, with the memory of this platform."""
    prepared = PREPARED_ON_A_GPU if _platform(problem) == "gpu" else 0
    return chunkwise(problem, chunk_size, prepared=prepared)


def _one_token(
    problem: Problem, chunk_size: int | None, *, in_place: bool
) -> tuple[jax.Array, jax.Array]:
    from deltanet_jax.kernels import mosaic_gpu

    return mosaic_gpu.one_token(problem, in_place=in_place)


def _one_token_why_not(problem: Problem) -> str | None:
    from deltanet_jax.kernels import mosaic_gpu

    return mosaic_gpu.why_not_compile_one_token() or mosaic_gpu.why_not_one_token(problem)


ONE_TOKEN = partial(_one_token, in_place=False)
ONE_TOKEN_IN_PLACE = partial(_one_token, in_place=True)


class Row(NamedTuple):
    """An implementation, and what it cannot do.

    Each reason is one sentence, from shapes, dtypes and versions alone.
    """

    algorithm: Algorithm
    why_not: WhyNot | None = None  # it cannot run this call
    not_by_choice: Callable[[Problem], str | None] | None = None  # it runs when it is named alone

    def reason(self, problem: Problem, chunk_size: int | None) -> str | None:
        """Return why this cannot run the call, or `None` if it can."""
        return None if self.why_not is None else self.why_not(problem, chunk_size)

    def reason_as_candidate(self, problem: Problem, chunk_size: int | None) -> str | None:
        """Return why this is passed over where there is a choice, or `None`."""
        reason = None if self.not_by_choice is None else self.not_by_choice(problem)
        return self.reason(problem, chunk_size) if reason is None else reason


IMPLEMENTATIONS: dict[str, Row] = {
    "recurrent": Row(recurrent),
    "associative": Row(associative),
    "chunkwise": Row(_chunkwise),
    "chunkwise_solve": Row(chunkwise_solve),
    "pallas": Row(_pallas, _pallas_why_not, _not_its_hardware),
}


def choose(
    implementation: Implementation | Sequence[Implementation] | None,
    problem: Problem,
    chunk_size: int | None,
) -> Algorithm:
    """The algorithm that a call gets.

    Raises:
        ValueError: If a name is unknown or a sequence is empty.
        NotImplementedError: If nothing that was named can run this call; `None` always can.
    """
    if implementation is None:
        return _choose_best(problem, chunk_size)
    if isinstance(implementation, str) or not isinstance(implementation, Sequence):
        reason = reason_against(implementation, problem, chunk_size)
        if reason is not None:
            raise NotImplementedError(f"`implementation={implementation!r}`: {reason}")
        return _lookup(implementation).algorithm
    return _choose_first(implementation, problem, chunk_size)


def choose_for_one_token(problem: Problem) -> Algorithm:
    """The recurrence; on a GPU in a kernel, if it covers the call and one device holds the arrays.

    A state that the caller holds is left as it is. Under `jit` the kernel overwrites it, which
    costs a copy where the state is neither donated nor the carry of a loop; a new array each
    time would cost a copy where it is.
    """
    shared = _is_shared(problem.v) or _is_shared(problem.initial_state)
    if _platform(problem) != "gpu" or shared or _one_token_why_not(problem) is not None:
        return recurrent
    traced = isinstance(problem.initial_state, jax.core.Tracer)
    return ONE_TOKEN_IN_PLACE if traced else ONE_TOKEN


def _is_shared(x: jax.Array | None) -> bool:
    """Whether axes of a mesh, some of them not handed out by hand, hold this array."""
    if x is None:
        return False
    mesh = mesh_of(x)
    free = [kind != AxisType.Manual for kind in mesh.axis_types]
    several = any(size > 1 for size, is_free in zip(mesh.axis_sizes, free, strict=True) if is_free)
    return several or (any(free) and not all(free))


def reason_against(
    implementation: Implementation, problem: Problem, chunk_size: int | None
) -> str | None:
    """Return why this one implementation cannot run the call, or `None` if it can."""
    return _lookup(implementation).reason(problem, chunk_size)


@partial(jax.jit, static_argnames=("algorithm", "chunk_size"))
def run(
    problem: Problem, *, algorithm: Algorithm, chunk_size: int | None
) -> tuple[jax.Array, jax.Array]:
    """Run a chosen algorithm, compiled once per shape also where the caller is not under `jit`."""
    return algorithm(problem, chunk_size)


def check_name(implementation: object) -> None:
    """Raise `ValueError` unless this is a callable or a known name."""
    if callable(implementation):
        return
    if not isinstance(implementation, str) or implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"`implementation` must be one of {sorted(IMPLEMENTATIONS)}, a callable, a sequence "
            f"of these or None; got {implementation!r}"
        )


def _lookup(implementation: Implementation) -> Row:
    """Return the row of a name; a callable states its limits in its attribute `why_not`."""
    check_name(implementation)
    if callable(implementation):
        return Row(implementation, getattr(implementation, "why_not", None))
    return IMPLEMENTATIONS[implementation]


def _choose_best(problem: Problem, chunk_size: int | None) -> Algorithm:
    """Choose what measured best: see `docs/choosing.md`."""
    platform = _platform(problem)
    if problem.q.shape[1] <= 1:
        return recurrent
    kernels = IMPLEMENTATIONS["pallas"]
    if kernels.reason_as_candidate(problem, chunk_size) is None:
        return kernels.algorithm
    # Every serial step costs a GPU its launches; the scan has few, for much memory.
    if platform == "gpu" and numbers_in_chunk_maps(problem, chunk_size) <= FEW_NUMBERS:
        return associative_chunks
    # Form 1 does the least arithmetic; form 2 has the shorter serial chain.
    return chunkwise_solve if platform == "cpu" else _chunkwise


def _choose_first(
    candidates: Sequence[Implementation], problem: Problem, chunk_size: int | None
) -> Algorithm:
    if not candidates:
        raise ValueError("`implementation` must name at least one candidate; got an empty sequence")
    rows = [_lookup(name) for name in candidates]  # a wrong name fails, though it comes last
    reasons = []
    for name, row in zip(candidates, rows, strict=True):
        reason = row.reason_as_candidate(problem, chunk_size)
        if reason is None:
            return row.algorithm
        reasons.append(f"{name!r}: {reason}")
    raise NotImplementedError("no candidate of `implementation` can run: " + "; ".join(reasons))


def _platform(problem: Problem) -> str:
    """Where the call will run: the device of its inputs if they have one, else the default.

    Under `jit` that is the device of their mesh, which may be one that is only described, or
    the default device: a tracer does not tell that its array was put elsewhere.
    """
    described = mesh_of(problem.q).abstract_device
    if not isinstance(problem.q, jax.core.Tracer) and isinstance(problem.q, jax.Array):
        platform = next(iter(problem.q.devices())).platform
    else:
        platform = _default_platform() if described is None else described.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def is_on_default_platform(x: jax.Array) -> bool:
    """Whether a choice made while `x` is traced is the one made for where `x` lies."""
    if isinstance(x, jax.core.Tracer):
        return True
    return {device.platform for device in x.devices()} == {_default_platform()}


def _default_platform() -> str:
    config: Any = jax.config  # whose attributes have types in some versions of JAX only
    device: jax.Device | str | None = config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform
