"""Common parts of launches that treat all chunks in parallel."""

import dataclasses

import jax
import jax.numpy as jnp

from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK

__all__ = ["ChunkPlan", "decayed_shapes"]


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """Everything static about one launch; an item of work is one chunk of one head."""

    batch: int
    chunks: int
    heads: int  # value heads
    group: int  # value heads per key head
    key_dim: int
    dtype: jnp.dtype
    delta: bool
    interpret: bool


def decayed_shapes(plan) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes of a chunk's operands decayed by a vector gate, or of their gradients."""
    shape = jax.ShapeDtypeStruct
    chunk = plan.batch, plan.chunks, plan.heads
    keys = shape((plan.batch, plan.chunks * CHUNK, plan.heads, plan.key_dim), plan.dtype)
    shapes = {"queries": keys, "writes": keys}
    shapes |= {"scores": shape((*chunk, CHUNK, CHUNK), plan.dtype)}
    shapes |= {"kept": shape((*chunk, plan.key_dim), jnp.float32)}
    return shapes | ({"keys": keys} if plan.delta else {})
