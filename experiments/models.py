"""Small language models of one shape that differ in one thing: the memory of their mixers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from deltanet_jax.core.recurrence import Problem
from deltanet_jax.layers.convolution import ShortConvolution, causal_convolution
from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from deltanet_jax.ops import variants

__all__ = ["MEMORIES", "SoftmaxAttention", "make_model", "memory_floats"]

MEMORIES = ("softmax", "linear", "gated-linear", "delta", "gated-delta")


class SoftmaxAttention(nnx.Module):
    """Causal softmax attention behind the same projections and convolutions; a baseline only.

    Positions are rotary (Su et al., 2021, arXiv:2104.09864).
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, conv_size: int | None, rngs: nnx.Rngs
    ) -> None:
        """`hidden_size` must be a multiple of `2 * num_heads`."""
        self.num_heads = num_heads
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        for name in names:
            setattr(self, name, nnx.Linear(hidden_size, hidden_size, use_bias=False, rngs=rngs))
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
        if mask is not None:
            raise ValueError("`mask` is not for this baseline; got one")
        q, k, v = (self._heads(x, name, segment_ids) for name in "qkv")
        seen = None
        if segment_ids is not None:
            seen = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, mask=seen, is_causal=True)
        return self.o_proj(y.reshape(x.shape))

    def _heads(
        self, x: Float[Array, "B T D"], name: str, runs: Int[Array, "B T"] | None
    ) -> Float[Array, "B T H K"]:
        y = getattr(self, f"{name}_proj")(x)
        if self.conv_size is not None:
            y = causal_convolution(y, getattr(self, f"{name}_conv").kernel[...], None, runs)
        return y.reshape(*y.shape[:2], self.num_heads, -1)


def rotate(x: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
    """Turn the pair of channels `(i, i + K/2)` at token `t` by `t / 10000^(2i/K)`."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * rates)[:, None]  # [T, 1, K/2]
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class NoMLP(nnx.Module):
    """In the place of an MLP: adds nothing."""

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Zeros."""
        return jnp.zeros_like(x)


def without_delta_rule(problem: Problem, chunk_size: int | None) -> tuple[jax.Array, jax.Array]:
    """The same tokens for a memory that adds and never corrects."""
    problem = replace(problem, beta=None)
    return variants.choose(None, problem, chunk_size)(problem, chunk_size)


def make_model(
    config: DeltaNetConfig, memory: str, rngs: nnx.Rngs, *, mlp: bool = True
) -> DeltaNetLM:
    """The language model of this config with one of `MEMORIES` in every block.

    `linear` and `gated-linear` are the layers of `delta` and `gated-delta` without the delta
    rule and the write strength. Without `mlp` the blocks are mixers alone.

    Raises:
        ValueError: If there is no such memory.
    """
    if memory not in MEMORIES:
        raise ValueError(f"`memory` must be one of {', '.join(MEMORIES)}; got {memory!r}")
    adds = memory in ("linear", "gated-linear")
    model = DeltaNetLM(
        replace(
            config,
            gate="scalar" if memory.startswith("gated") else "none",
            use_beta=config.use_beta and not adds,
        ),
        implementation=without_delta_rule if adds else None,
        rngs=rngs,
    )
    for block in model.blocks:
        if memory == "softmax":
            block.mixer = SoftmaxAttention(
                config.hidden_size, config.num_heads, conv_size=config.conv_size, rngs=rngs
            )
        if not mlp:
            block.mlp = NoMLP()
    return model


def memory_floats(config: DeltaNetConfig, memory: str, tokens: int) -> int:
    """Numbers that all blocks keep of this many tokens, but for the convolutions' inputs."""
    if memory == "softmax":
        return config.num_layers * 2 * tokens * config.hidden_size
    return config.num_layers * config.value_heads * config.key_dim * config.value_dim
