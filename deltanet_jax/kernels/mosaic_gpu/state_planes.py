"""Layout of the states of the chunks and of their gradients in memory.

With `stride` 2 only the states that enter the even chunks are stored; the one between two of them
is recomputed where it is needed.

The gradient `G` of the state that leaves a chunk is stored transposed, in planes of 64 columns of
V. A plane is an array `[B, T, HV, K]`: at the 64 tokens of a chunk it holds 64 rows of `G^T`.
The gradients of `q` and `k` can take the place of the first two planes.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Ref
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["WIDTH", "count", "dot_rows", "load_planes", "stride"]

WIDTH = CHUNK  # columns of V in a plane, which has a token for each of them


def stride(shape: Shape) -> int:
    """Return the stride of the chunks whose incoming state is stored.

    It is 1 where the gradients read the state in parts, which leave none of it in shared memory,
    and with a vector gate.
    """
    return 1 if shape.vector_gate or shape.value_dim > 128 else 2


def count(shape: Shape) -> int:
    """Number of planes."""
    return shape.value_dim // WIDTH


def load_planes(planes: Sequence[Ref], place: tuple[Any, ...], target: Ref, barrier: Ref) -> None:
    """Issue the loads of `G^T` from some planes at `place`, one below the other."""
    for i, plane in enumerate(planes):
        rows = pl.ds(i * WIDTH, WIDTH)
        plgpu.copy_gmem_to_smem(plane.at[place], target.at[rows], barrier)


def dot_rows(state: Ref, cotangent: Ref, *, interpret: bool) -> jax.Array:
    """`rowsum(S * G)` of the tiles of 64 rows of `S` and of `G^T`; squares keep registers free."""
    rows = []
    for at in (pl.ds(i, WIDTH) for i in range(0, state.shape[1], WIDTH)):
        square = smem.load_transposed(cotangent.at[at], interpret=interpret)
        rows += [(smem.matrix(state.at[:, at]) * square).sum(axis=1)]
    return functools.reduce(operator.add, rows[1:], 0.0 + rows[0])
