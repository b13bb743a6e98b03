"""Tiles and vectors of shared memory, and the registers that they are read into."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Ref

__all__ = [
    "MATRIX",
    "Layout",
    "cast",
    "column",
    "load",
    "load_f32",
    "load_f32_transposed",
    "load_transposed",
    "matrix",
    "over_columns",
    "over_rows",
    "row",
    "store_f32_transposed",
    "store_transposed",
    "tile",
    "transposed",
    "zeros",
]

Layout = Any  # how an array lies in the registers of a warpgroup; Pallas has several types
MATRIX: Layout = plgpu.Layout.WGMMA  # of the result of a product
TRANSPOSED: Layout = plgpu.Layout.WGMMA_TRANSPOSED


def load(ref: Ref, layout: Layout, *, optimized: bool = True) -> jax.Array:
    """Load what a reference holds into registers; not `optimized`, also where it is not aligned."""
    # Its arguments are others in other versions of JAX.
    x: jax.Array = plgpu.load(ref, layout=layout, optimized=optimized)
    return x


def cast(x: jax.Array, layout: Layout) -> jax.Array:
    """An array in registers, in another layout."""
    out: jax.Array = plgpu.layout_cast(x, layout)
    return out


def tile(*shape: int, dtype: DTypeLike, swizzle: int = 128) -> Ref:
    """A shared-memory tile that wgmma and the copy engine both read.

    All operands of one product need the same swizzle, so it is named by the caller and only
    narrowed where a row is shorter.
    """
    width = jnp.dtype(dtype).itemsize
    swizzle = min(swizzle, shape[-1] * width)
    transforms = (plgpu.TilingTransform((8, swizzle // width)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def transposed(ref: Ref) -> Ref:
    """The transpose of a tile, as an operand: the tensor cores read 16-bit tiles either way."""
    return ref.transpose((1, 0))


def load_f32(ref: Ref) -> jax.Array:
    """A block of a float32 array in device memory, in registers."""
    return load(ref, MATRIX, optimized=False)


def load_f32_transposed(ref: Ref, *, interpret: bool) -> jax.Array:
    """The transpose of a block of a float32 array in device memory, in registers."""
    if interpret:
        return jnp.asarray(ref[...].T)
    return cast(load(transposed(ref), TRANSPOSED, optimized=False), MATRIX)


def store_f32_transposed(ref: Ref, x: jax.Array, *, interpret: bool) -> None:
    """Store the transpose of a float32 array in registers to device memory."""
    if interpret:
        ref[...] = x.T
    else:
        transposed(ref)[...] = cast(x, TRANSPOSED)


def zeros(shape: tuple[int, ...]) -> jax.Array:
    """Return zeros in float32 registers."""
    return cast(jnp.zeros(shape, jnp.float32), MATRIX)


def matrix(ref: Ref) -> jax.Array:
    """A 16-bit tile as float32 registers."""
    return load(ref, MATRIX).astype(jnp.float32)


def row(ref: Ref) -> jax.Array:
    """A vector over the rows of a product, in registers."""
    return load(ref, MATRIX.reduce(1), optimized=False)


def column(ref: Ref) -> jax.Array:
    """A vector over the columns of a product, in registers."""
    return load(ref, MATRIX.reduce(0), optimized=False)


def over_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`vector[i]` at every `[i, j]`."""
    return cast(jax.lax.broadcast_in_dim(vector, shape, [0]), MATRIX)


def over_columns(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`vector[j]` at every `[i, j]`."""
    return cast(jax.lax.broadcast_in_dim(vector, shape, [1]), MATRIX)


def load_transposed(ref: Ref, *, interpret: bool) -> jax.Array:
    """The transpose of a 16-bit tile, as float32 registers."""
    if interpret:
        return jnp.asarray(ref[...].T.astype(jnp.float32))
    return matrix(transposed(ref))


def store_transposed(ref: Ref, x: jax.Array, *, interpret: bool) -> None:
    """Store the transpose of 16-bit registers."""
    if interpret:
        ref[...] = x.T
    else:
        transposed(ref)[...] = x
