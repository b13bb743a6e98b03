"""One sequence over many devices: its time axis is sharded over an axis of a mesh."""

from deltanet_jax.parallel.context import linear_attention
from deltanet_jax.parallel.exchange import from_last, halo, incoming_state, prefix
from deltanet_jax.parallel.regions import along_context, check_axis

__all__ = [
    "along_context",
    "check_axis",
    "from_last",
    "halo",
    "incoming_state",
    "linear_attention",
    "prefix",
]
