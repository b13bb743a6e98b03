"""Delta-rule linear attention in JAX: one family, three interchangeable parallel forms."""

from deltanet_jax._version import __version__
from deltanet_jax.layers.delta_net import (
    AssociativeDeltaNet,
    ChunkwiseDeltaNet,
    DeltaNet,
    RecurrentDeltaNet,
)
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

__all__ = [
    "AssociativeDeltaNet",
    "ChunkwiseDeltaNet",
    "DeltaNet",
    "RecurrentDeltaNet",
    "__version__",
    "delta_rule",
    "gated_delta_rule",
    "gated_linear_attention",
    "kimi_delta_attention",
    "linear_attention",
    "normalized_linear_attention",
    "step",
    "why_not",
]
