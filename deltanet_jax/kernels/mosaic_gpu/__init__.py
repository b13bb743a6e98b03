"""Chunkwise kernels for NVIDIA Hopper in Pallas Mosaic GPU."""

import jax

from deltanet_jax.core.recurrence import Problem

__all__ = ["chunkwise", "why_not"]


def why_not(problem: Problem, chunk_size: int | None) -> str | None:
    """Why these kernels cannot run the problem."""
    return "there is no GPU kernel yet"


def chunkwise(
    problem: Problem, chunk_size: int | None = None, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Run the kernels; only for a problem that `why_not` accepts."""
    raise NotImplementedError(why_not(problem, chunk_size))
