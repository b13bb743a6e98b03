"""Chunkwise kernels for TPUs in Pallas Mosaic TPU."""

from deltanet_jax.kernels.mosaic_tpu.differentiable import chunkwise
from deltanet_jax.kernels.mosaic_tpu.plan import why_not

__all__ = ["chunkwise", "why_not"]
