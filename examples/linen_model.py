"""The layers as Linen modules: scanned, rematerialised, partitioned, with a mutable cache."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge
from jaxtyping import Array, Float

from deltanet_jax import ChunkwiseDeltaNet
from deltanet_jax.layers.linen import logical_axes

__all__ = ["Block", "Stack"]


class Block(nn.Module):
    """Compute `x + mixer(norm(x))`; with `decode`, continue from the collection `cache`."""

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
    """Scan blocks under `nn.remat`; parameters get an axis `layers`."""

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


def main() -> None:
    """Read a sequence whole, then in two pieces through the mutable cache."""
    x = jax.random.normal(jax.random.key(0), (2, 12, 16))
    whole, decoding = Stack(), Stack(decode=True)
    variables = whole.init(jax.random.key(1), x)
    spec = nn.get_partition_spec(variables)["params"]["blocks"]["mixer"]["q_proj"]["kernel"]
    print("logical axes of the query projection:", spec)
    parameters = {"params": variables["params"]}
    state = {"cache": decoding.init(jax.random.key(1), x[:, :1])["cache"]}
    pieces = []
    for piece in (x[:, :8], x[:, 8:]):
        y, state = decoding.apply({**parameters, **state}, piece, mutable=["cache"])
        pieces.append(y)
    error = jnp.abs(jnp.concatenate(pieces, axis=1) - whole.apply(parameters, x)).max()
    print(f"largest difference of the pieces to the whole: {error:.1e}")


if __name__ == "__main__":
    main()
