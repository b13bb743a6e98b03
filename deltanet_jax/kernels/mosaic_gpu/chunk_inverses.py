"""The inverse that the delta rule needs of every chunk, in any order of the chunks.

Rows of one chunk, `D_ij = exp(b_i - b_j)`::

    T = (I + L)^-1        L = stril(D * (k k^T) * beta_j)

`beta` stands on the columns, so that `u = T (v - exp(b) k S)` and the values that are written
are `beta u`: every gradient is then free of divisions by `beta`.

The inverse is never formed by powers of `L`. Blocks of 32 rows are inverted in float32; of the
whole only the block below these two is then new: `-X (L between them) X`.
Products of split (high, low) bfloat16 pairs, three for one, keep 16 bits of mantissa; one in tf32
would keep 11.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import pairs
from deltanet_jax.kernels.mosaic_gpu.blocks import (
    CHUNK,
    lanes,
    launches,
    mma,
    smem,
    triangular,
    warp,
)
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.pipeline import Share, unravel
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.tuning import config_of, sm_count

__all__ = [
    "InverseTiles",
    "chunk_inverses",
    "copy_inverse",
    "inverse_tiles",
    "minus_overlaps",
    "store_inverse",
]

HALF = triangular.PAIR


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch; an item of work is one chunk of one head."""

    shape: Shape
    interpret: bool

    @property
    def items(self) -> int:
        return self.shape.batch * self.shape.chunks * self.shape.heads

    @property
    def programs(self) -> int:
        """Thread blocks of the persistent kernel: as many as the SMs hold at once."""
        residents = config_of("chunk_inverses", self.shape).residents
        return min(self.items, 2 if self.interpret else residents * sm_count())


class Inputs(NamedTuple):
    """Arrays that the kernel reads of every chunk, or tiles for them."""

    k: Ref
    beta: Ref
    b: Ref  # `None` without a gate
    b_column: Ref  # `b` again: row and column views of one vector need a tile each


class InverseTiles(NamedTuple):
    """The shared memory that `store_inverse` needs."""

    below_high: Ref
    below_low: Ref
    blocks: Ref
    high: Ref  # `None` in bfloat16
    left: Ref  # half of the columns of the result
    low: Ref
    right: Ref


class Scratch(NamedTuple):
    """Shared memory of a thread block: `InverseTiles` and `Inputs`."""

    below_high: Ref
    below_low: Ref
    blocks: Ref
    high: Ref
    left: Ref
    low: Ref
    right: Ref
    k: Ref
    beta: Ref
    b: Ref
    b_column: Ref


def inverse_tiles(dtype: jnp.dtype, *count: int) -> InverseTiles:
    """Return the types of the tiles, `count` times."""
    half = smem.tile(*count, HALF, HALF, dtype=jnp.bfloat16)
    side = smem.tile(*count, CHUNK, HALF, dtype=dtype)
    return InverseTiles(
        below_high=half,
        below_low=half,
        blocks=plgpu.SMEM((*count, *triangular.scratch_shape()), jnp.float32),
        high=None if dtype == jnp.bfloat16 else half,
        left=side,
        low=half,
        right=side,
    )


def _product(x: mma.Split, y: mma.Split, *, interpret: bool) -> jax.Array:
    """Multiply two split pairs, `[C, 32]`."""
    return mma.product((CHUNK, HALF), *mma.of_halves(x, y), interpret=interpret)


def store_inverse(
    x: jax.Array, tiles: InverseTiles, *, dtype: jnp.dtype, interpret: bool
) -> tuple[Ref, Ref]:
    """Store `(I - stril(x))^-1` of a chunk in two tiles, the left and the right half of it.

    Nothing of `tiles` may be in use before, nor change until the inverse has been read.
    `commit_smem` is the caller's.
    """
    store = functools.partial(lanes.store_rows, interpret=interpret)
    halves = functools.partial(lanes.halves, interpret=interpret)
    left, right = tiles.left, tiles.right
    upper, lower = pl.ds(0, HALF), pl.ds(HALF, HALF)
    below = tiles.below_high, tiles.below_low
    store(below, halves(x[:, :HALF]), lower=True)
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK, HALF), 0, layout=smem.MATRIX)
    blocks = jnp.where(row < HALF, x[:, :HALF], x[:, HALF:])
    blocks = triangular.inverses(blocks, tiles.blocks, interpret=interpret)
    diagonal = halves(blocks)
    above = left.at[upper], tiles.low  # the halves of the upper block
    rounded = diagonal[0]
    if dtype != jnp.bfloat16:
        above = tiles.high, tiles.low
        rounded = blocks.astype(dtype)
        store((left.at[upper],), (rounded,), lower=False)
    store(above, diagonal, lower=False)
    right[...] = warp.odd_rows(rounded, None, HALF, interpret=interpret)
    plgpu.commit_smem()
    weights = halves(_product(diagonal, below, interpret=interpret))
    corner = _product(weights, above, interpret=interpret)
    store((left.at[lower],), (corner.astype(dtype),), lower=True)
    return left, right


def copy_inverse(halves: tuple[Ref, Ref], out: Ref) -> None:
    """Send a stored inverse to `out`, `[C, C]` in device memory."""
    for at, half in enumerate(halves):
        plgpu.copy_smem_to_gmem(half, out.at[:, pl.ds(at * HALF, HALF)])


def minus_overlaps(
    k: Ref, beta: Ref, b: Ref, b_column: Ref, meanwhile: Callable[[], None] | None = None
) -> jax.Array:
    """`-D * (k k^T) * beta_j` of a chunk; above the diagonal anything.

    `meanwhile` is called once the product is started, so that it is overlapped with it.
    """
    x = pairs.overlaps(k, k, meanwhile)
    x *= smem.over_columns(-smem.column(beta), (CHUNK, CHUNK))
    return pairs.decayed(x, b, b_column)


def _body(plan: Plan, refs: Inputs, out: Ref, tiles: Scratch, loaded: Ref) -> None:
    own = Inputs(tiles.k, tiles.beta, tiles.b, tiles.b_column)
    inverse = InverseTiles(*tiles[: -len(own)])
    share = Share(plan.items, plan.programs)
    rounds = share.rounds

    def place(i: Index) -> tuple[Index, ...]:
        """Batch, chunk and head of the i-th item of this thread block."""
        return unravel(share.item(i), plan.shape.chunks, plan.shape.heads)

    def load(i: Index) -> None:
        batch, chunk, head = place(i)
        keys = refs.k.at[batch, pl.ds(chunk * CHUNK, CHUNK), lax.div(head, plan.shape.group)]
        plgpu.copy_gmem_to_smem(keys, own.k, loaded)
        for vector, tile in zip(refs[1:], own[1:], strict=True):
            if vector is not None:
                plgpu.copy_gmem_to_smem(vector.at[batch, chunk, head], tile, loaded)

    def step(i: Index, _: None) -> None:
        plgpu.barrier_wait(loaded)
        x = minus_overlaps(*own)
        # The stores have read their tiles, and all warps what is loaded next.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
        pl.when(i + 1 < rounds)(lambda: load(i + 1))
        halves = store_inverse(x, inverse, dtype=plan.shape.dtype, interpret=plan.interpret)
        plgpu.commit_smem()
        copy_inverse(halves, out.at[place(i)])

    load(0)
    lax.fori_loop(0, rounds, step, None)
    plgpu.wait_smem_to_gmem(0)


def chunk_inverses(
    shape: Shape,
    k: jax.Array,
    beta: jax.Array,
    b: jax.Array | None,
    *,
    interpret: object = None,
) -> jax.Array:
    """`T` of every chunk.

    Args:
        shape: Sizes and variant of the call.
        k: `[B, T, H, K]` with T a multiple of 64, in 16 bits.
        beta: `[B, N, HV, C]` float32.
        b: In-chunk cumulative log-decay, `[B, N, HV, C]` float32, or `None` without a gate.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `[B, N, HV, C, C]` in the dtype of `k`.
    """
    plan = Plan(shape=shape, interpret=interpret is not None)
    inputs = Inputs(k, beta, b, b)
    vector = plgpu.SMEM((CHUNK,), jnp.float32)
    vectors = [None if x is None else vector for x in inputs[1:]]
    keys = smem.tile(CHUNK, shape.key_dim, dtype=shape.dtype)
    out: Ref = jax.ShapeDtypeStruct((*beta.shape, CHUNK), shape.dtype)
    inverses: jax.Array = launches.launch(
        "chunk_inverses",
        functools.partial(_body, plan),
        inputs,
        out,
        Scratch(*inverse_tiles(shape.dtype), keys, *vectors),
        plgpu.Barrier(num_arrivals=sum(x is not None for x in inputs)),
        programs=plan.programs,
        interpret=interpret,
    )
    return inverses
