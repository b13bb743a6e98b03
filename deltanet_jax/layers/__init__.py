"""Flax layers: the token mixers."""

from deltanet_jax.layers.cache import (
    DeltaNetCache,
    copy_slots,
    put_slots,
    reset_slots,
    select_slots,
)
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
    "copy_slots",
    "put_slots",
    "reset_slots",
    "select_slots",
]
