"""Delta-rule linear attention in JAX: six variants, interchangeable parallel algorithms."""

from deltanet_jax._version import __version__
from deltanet_jax.layers.delta_net import (
    AssociativeDeltaNet,
    ChunkwiseDeltaNet,
    DeltaNet,
    RecurrentDeltaNet,
)
from deltanet_jax.layers.norms import l2_norm
from deltanet_jax.ops.api import (
    delta_rule,
    gated_delta_rule,
    gated_linear_attention,
    kimi_delta_attention,
    linear_attention,
    normalized_linear_attention,
    step,
    why_not,
)
from deltanet_jax.ops.packing import (
    cu_seqlens_to_segment_ids,
    lengths_to_cu_seqlens,
    pack_padded,
    pad_packed,
    segment_ids_to_cu_seqlens,
)

__all__ = [
    "AssociativeDeltaNet",
    "ChunkwiseDeltaNet",
    "DeltaNet",
    "RecurrentDeltaNet",
    "__version__",
    "cu_seqlens_to_segment_ids",
    "delta_rule",
    "gated_delta_rule",
    "gated_linear_attention",
    "kimi_delta_attention",
    "l2_norm",
    "lengths_to_cu_seqlens",
    "linear_attention",
    "normalized_linear_attention",
    "pack_padded",
    "pad_packed",
    "segment_ids_to_cu_seqlens",
    "step",
    "why_not",
]
