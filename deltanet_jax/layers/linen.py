"""Metadata that `flax.nnx.bridge` needs to make complete Linen modules of the layers."""

import jax
from flax import linen as nn
from flax import nnx

__all__ = ["logical_axes"]


def logical_axes(variable: "nnx.Variable[jax.Array]") -> nn.LogicallyPartitioned:
    """A parameter with its logical axes as Linen's own metadata, for the bridge's `metadata_fn`.

    The bridge's default metadata ignores the axis that `nn.scan` and `nn.vmap` add, and then
    names too few axes.

    ::

        bridge.to_linen(ChunkwiseDeltaNet, 256, num_heads=4, metadata_fn=logical_axes)
    """
    names = variable.get_metadata()["out_sharding"]
    return nn.LogicallyPartitioned(variable.get_value(), names)
