"""Chunkwise kernels for NVIDIA Hopper in Pallas Mosaic GPU."""

from deltanet_jax.kernels.mosaic_gpu.differentiable import chunkwise
from deltanet_jax.kernels.mosaic_gpu.support import why_not

__all__ = ["chunkwise", "why_not"]
