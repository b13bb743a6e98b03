"""Tiles and vectors of shared memory, and the registers that they are read into."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = [
    "MATRIX",
    "column",
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

MATRIX = plgpu.Layout.WGMMA  # of the result of a product, in registers


def tile(*shape: int, dtype, swizzle: int = 128):
    """A shared-memory tile that wgmma and the copy engine both read.

    All operands of one product need the same swizzle, so it is named by the caller and only
    narrowed where a row is shorter.
    """
    width = jnp.dtype(dtype).itemsize
    swizzle = min(swizzle, shape[-1] * width)
    transforms = (plgpu.TilingTransform((8, swizzle // width)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def transposed(ref):
    """The transpose of a tile, as an operand: the tensor cores read 16-bit tiles either way."""
    return ref.transpose((1, 0))


def load_f32(ref) -> jax.Array:
    """A block of a float32 array in device memory, in registers."""
    return plgpu.load(ref, layout=MATRIX, optimized=False)


def load_f32_transposed(ref, *, interpret) -> jax.Array:
    """The transpose of a block of a float32 array in device memory, in registers."""
    if interpret:
        return ref[...].T
    x = plgpu.load(transposed(ref), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    return plgpu.layout_cast(x, MATRIX)


def store_f32_transposed(ref, x: jax.Array, *, interpret) -> None:
    """Store the transpose of a float32 array in registers to device memory."""
    if interpret:
        ref[...] = x.T
    else:
        transposed(ref)[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def zeros(shape: tuple[int, int]) -> jax.Array:
    """Return zeros in float32 registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)


def matrix(ref) -> jax.Array:
    """A 16-bit tile as float32 registers."""
    return plgpu.load(ref, layout=MATRIX).astype(jnp.float32)


def row(ref) -> jax.Array:
    """A vector over the rows of a product, in registers."""
    return plgpu.load(ref, layout=MATRIX.reduce(1), optimized=False)


def column(ref) -> jax.Array:
    """A vector over the columns of a product, in registers."""
    return plgpu.load(ref, layout=MATRIX.reduce(0), optimized=False)


def over_rows(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """`vector[i]` at every `[i, j]`."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, [0]), MATRIX)


def over_columns(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """`vector[j]` at every `[i, j]`."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, [1]), MATRIX)


def load_transposed(ref, *, interpret) -> jax.Array:
    """The transpose of a 16-bit tile, as float32 registers."""
    if interpret:
        return ref[...].T.astype(jnp.float32)
    return matrix(transposed(ref))


def store_transposed(ref, x: jax.Array, *, interpret) -> None:
    """Store the transpose of 16-bit registers."""
    if interpret:
        ref[...] = x.T
    else:
        transposed(ref)[...] = x
