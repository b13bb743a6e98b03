"""Flax layers: the token mixers."""

from deltanet_jax.layers.cache import DeltaNetCache
from deltanet_jax.layers.delta_net import (
    AssociativeDeltaNet,
    ChunkwiseDeltaNet,
    DeltaNet,
    RecurrentDeltaNet,
)

__all__ = [
    "AssociativeDeltaNet",
    "ChunkwiseDeltaNet",
    "DeltaNet",
    "DeltaNetCache",
    "RecurrentDeltaNet",
]
