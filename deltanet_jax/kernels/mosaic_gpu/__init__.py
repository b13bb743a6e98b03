"""Kernels for NVIDIA Hopper in Pallas Mosaic GPU: by chunks, and of one token."""

from deltanet_jax.kernels.mosaic_gpu.chunkwise import chunkwise
from deltanet_jax.kernels.mosaic_gpu.one_token import one_token
from deltanet_jax.kernels.mosaic_gpu.support import (
    why_not,
    why_not_compile_one_token,
    why_not_one_token,
)

__all__ = ["chunkwise", "one_token", "why_not", "why_not_compile_one_token", "why_not_one_token"]
