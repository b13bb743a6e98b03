"""The layers as Linen modules: scanned, rematerialised, partitioned, with a mutable cache."""

from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge
from jaxtyping import Array, Float

from deltanet_jax import ChunkwiseDeltaNet
from deltanet_jax.layers.linen import logical_axes

__all__ = ["Block", "Stack"]


class Block(nn.Module):
    """`x + mixer(norm(x))`; `decode` goes on from the collection `cache` and updates it."""

    num_heads: int = 2
    decode: bool = False
    layer: type = ChunkwiseDeltaNet

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], _: None = None) -> tuple[Any, None]:
        mixer = bridge.to_linen(
            self.layer, x.shape[-1], self.num_heads, metadata_fn=logical_axes, name="mixer"
        )
        y = nn.RMSNorm(name="norm")(x)
        if not self.decode:
            return x + mixer(y), None
        cache = self.variable("cache", "state", self._empty, y.shape)
        mixed, new = mixer(y, cache.value, nnx_method="extend")
        if not self.is_initializing():
            cache.value = new
        return x + mixed, None

    def _empty(self, shape: tuple[int, int, int]) -> Any:
        layer = self.layer(shape[-1], self.num_heads, rngs=nnx.Rngs(0))
        return layer.init_cache(shape[0])


class Stack(nn.Module):
    """Blocks under one `nn.scan`, each under `nn.remat`; parameters get an axis `layers`."""

    num_layers: int = 3
    decode: bool = False
    layer: type = ChunkwiseDeltaNet

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> jax.Array:
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0, "cache": 0},
            split_rngs={"params": True},
            length=self.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        y, _ = blocks(decode=self.decode, layer=self.layer, name="blocks")(x, None)
        return y
