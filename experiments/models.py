"""Small language models of one shape that differ in one thing: the memory of their mixers."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from deltanet_jax import DeltaNet
from deltanet_jax.layers.convolution import ShortConvolution, causal_convolution, next_inputs
from deltanet_jax.models import DeltaNetConfig, DeltaNetLM

__all__ = ["MEMORIES", "KeyValueCache", "SoftmaxAttention", "make_model", "memory_floats"]


# Whether the memory has a gate, and whether it corrects what it holds; softmax attention apart.
MEMORIES = {
    "softmax": ("none", True),
    "linear": ("none", False),
    "gated-linear": ("scalar", False),
    "delta": ("none", True),
    "gated-delta": ("scalar", True),
}


class SumNet(DeltaNet):
    """`DeltaNet` that adds and never corrects: linear attention, with a gate or without."""

    def _gates(
        self, x: Float[Array, "B T D"], k: Float[Array, "B T H K"]
    ) -> tuple[jax.Array | None, None]:
        return super()._gates(x, k)[0], None


class KeyValueCache(NamedTuple):
    """Cache of softmax attention: room for `L` tokens, of which `length` are read.

    The convolutions' parts are their last `W - 1` inputs, and `None` without convolutions.
    """

    keys: Float[Array, "B H L K"]
    values: Float[Array, "B H L K"]
    length: Int[Array, ""]
    q_inputs: Float[Array, "B W-1 D"] | None = None
    k_inputs: Float[Array, "B W-1 D"] | None = None
    v_inputs: Float[Array, "B W-1 D"] | None = None


class SoftmaxAttention(nnx.Module):
    """Causal softmax attention behind the same projections and convolutions; a baseline only.

    Positions are rotary (Su et al., 2021, arXiv:2104.09864).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        conv_size: int | None,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """`hidden_size` must be a multiple of `2 * num_heads`."""
        self.num_heads = num_heads
        self.dtype = jnp.dtype(dtype or jnp.float32)
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        for name in names:
            linear = nnx.Linear(hidden_size, hidden_size, use_bias=False, dtype=dtype, rngs=rngs)
            setattr(self, name, linear)
        self.conv_size = conv_size
        if conv_size is not None:
            for name in ("q_conv", "k_conv", "v_conv"):
                conv = ShortConvolution(hidden_size, conv_size, param_dtype=jnp.float32, rngs=rngs)
                setattr(self, name, conv)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Attend to all earlier tokens of the same segment; there is no padding."""
        _no_mask(mask)
        projected = self._project(x)
        q, k, v = (self._heads(y, name, runs=segment_ids) for name, y in projected.items())
        seen = None
        if segment_ids is not None:
            seen = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, mask=seen, is_causal=True)
        return self.o_proj(y.reshape(x.shape))

    def init_cache(self, batch_size: int, room: int) -> KeyValueCache:
        """The cache before the first token, with room for so many."""
        B, D = batch_size, self.q_proj.in_features
        kv = (jnp.zeros((B, self.num_heads, room, D // self.num_heads), self.dtype) for _ in "kv")
        past = (jnp.zeros((B, self.conv_size - 1, D), self.dtype) for _ in "qkv" if self.conv_size)
        return KeyValueCache(*kv, jnp.zeros((), jnp.int32), *past)

    def extend(
        self,
        x: Float[Array, "B T D"],
        cache: KeyValueCache,
        *,
        mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValueCache]:
        """Continue from a cache that has room for these tokens."""
        _no_mask(mask)
        projected, past, start = self._project(x), cache[3:], cache.length
        q, k, v = (
            self._heads(y, name, inputs=before)
            for (name, y), before in zip(projected.items(), past, strict=True)
        )
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, jnp.swapaxes(new, 1, 2), start, axis=2)
            for old, new in ((cache.keys, rotate(k, start)), (cache.values, v))
        )
        # Heads stand before tokens in the cache, so that both products read it as it lies.
        scores = jnp.einsum(
            "bthk,bhlk->bhtl", rotate(q, start), keys, preferred_element_type=jnp.float32
        )
        places = start + jnp.arange(x.shape[1])
        seen = jnp.arange(keys.shape[2]) <= places[:, None]
        scores = jnp.where(seen, scores * keys.shape[-1] ** -0.5, -jnp.inf)
        y = jnp.einsum("bhtl,bhlk->bthk", jax.nn.softmax(scores).astype(x.dtype), values)
        if self.conv_size is not None:
            past = tuple(
                next_inputs(y, self.conv_size, before)
                for y, before in zip(projected.values(), past, strict=True)
            )
        after = KeyValueCache(keys, values, start + x.shape[1], *past)
        return self.o_proj(y.reshape(x.shape)), after

    def _project(self, x: Float[Array, "B T D"]) -> dict[str, Float[Array, "B T D"]]:
        return {name: getattr(self, f"{name}_proj")(x) for name in "qkv"}

    def _heads(
        self,
        y: Float[Array, "B T D"],
        name: str,
        *,
        inputs: Float[Array, "B W-1 D"] | None = None,
        runs: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T H K"]:
        if self.conv_size is not None:
            kernel = getattr(self, f"{name}_conv").kernel[...]
            y = causal_convolution(y, kernel, inputs, runs).astype(y.dtype)
        return y.reshape(*y.shape[:2], self.num_heads, -1)


def _no_mask(mask: object) -> None:
    if mask is not None:
        raise ValueError("`mask` is not for this baseline; got one")


def rotate(x: Float[Array, "B T H K"], start: int | Int[Array, ""] = 0) -> Float[Array, "B T H K"]:
    """Turn the pair of channels `(i, i + K/2)` at token `t` by `t / 10000^(2i/K)`."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half) / half)
    angles = ((start + jnp.arange(x.shape[1]))[:, None] * rates)[:, None]  # [T, 1, K/2]
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class NoMLP(nnx.Module):
    """Stand in for an MLP; adds nothing."""

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Zeros."""
        return jnp.zeros_like(x)


def make_model(
    config: DeltaNetConfig,
    memory: str,
    rngs: nnx.Rngs,
    *,
    implementation: str | None = None,
    mlp: bool = True,
) -> DeltaNetLM:
    """The language model of this config with one of `MEMORIES` in every block.

    `linear` and `gated-linear` are `delta` and `gated-delta` without the delta rule and the
    write strength. Without `mlp` the blocks are mixers alone.

    Raises:
        ValueError: If there is no such memory.
    """
    if memory not in MEMORIES:
        raise ValueError(f"`memory` must be one of {', '.join(MEMORIES)}; got {memory!r}")
    gate, corrects = MEMORIES[memory]
    config = replace(config, gate=gate, use_beta=config.use_beta and corrects)
    model = DeltaNetLM(config, implementation=implementation, rngs=rngs)
    for block in model.blocks:
        if memory == "softmax":
            block.mixer = SoftmaxAttention(
                config.hidden_size,
                config.num_heads,
                conv_size=config.conv_size,
                dtype=config.dtype and jnp.dtype(config.dtype),
                rngs=rngs,
            )
        elif not corrects:
            block.mixer = SumNet(
                **config.layer_options(),
                implementation=implementation,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )
        if not mlp:
            block.mlp = NoMLP()
    return model


def memory_floats(config: DeltaNetConfig, memory: str, tokens: int) -> int:
    """Count values that all blocks store of this many tokens, without convolutions' inputs."""
    if memory == "softmax":
        return config.num_layers * 2 * tokens * config.hidden_size
    return config.num_layers * config.value_heads * config.key_dim * config.value_dim
