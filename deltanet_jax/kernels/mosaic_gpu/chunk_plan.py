"""Shapes of the operands of a chunk that a vector gate decays."""

import jax
import jax.numpy as jnp

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["decayed_shapes"]


def decayed_shapes(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes of a chunk's operands decayed by a vector gate, or of their gradients."""
    array = jax.ShapeDtypeStruct
    chunk = shape.batch, shape.chunks, shape.heads
    keys = array((shape.batch, shape.tokens, shape.heads, shape.key_dim), shape.dtype)
    shapes = {"queries": keys, "writes": keys}
    shapes |= {"scores": array((*chunk, CHUNK, CHUNK), shape.dtype)}
    shapes |= {"kept": array((*chunk, shape.key_dim), jnp.float32)}
    return shapes | ({"keys": keys} if shape.delta else {})
