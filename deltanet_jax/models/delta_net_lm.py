"""A language model: embedding, pre-norm blocks of mixer and SwiGLU, head."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from deltanet_jax import compat
from deltanet_jax.core import checks
from deltanet_jax.core.linear import linear_map
from deltanet_jax.core.numerics import accumulation_dtype
from deltanet_jax.layers.cache import DeltaNetCache
from deltanet_jax.layers.checks import check_per_token, check_rngs, check_vocabulary
from deltanet_jax.layers.delta_net import DeltaNet
from deltanet_jax.layers.norms import RMSNorm
from deltanet_jax.layers.parameters import EMBED, MLP, VOCAB, parameter, projection
from deltanet_jax.models.config import DeltaNetConfig
from deltanet_jax.ops.api import Choice

__all__ = ["Block", "DeltaNetLM", "LMCache", "SwiGLU"]

LMCache = tuple[DeltaNetCache, ...]


class SwiGLU(nnx.Module):
    """`W_down (silu(W_gate x) * W_up x)` (Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, config: DeltaNetConfig, *, rngs: nnx.Rngs) -> None:
        linear = _projection(config, rngs)
        D, width = config.hidden_size, config.mlp_width
        self.gate_proj = linear(D, width, (EMBED, MLP))
        self.up_proj = linear(D, width, (EMBED, MLP))
        self.down_proj = linear(width, D, (MLP, EMBED))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        hidden = jax.nn.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden)


class Block(nnx.Module):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self,
        config: DeltaNetConfig,
        *,
        implementation: Choice,
        context_axis: str | None,
        rngs: nnx.Rngs,
    ) -> None:
        norm = partial(
            RMSNorm,
            config.hidden_size,
            eps=config.norm_eps,
            param_dtype=jnp.dtype(config.param_dtype),
            axis_name=EMBED,
        )
        self.mixer_norm, self.mlp_norm = norm(), norm()
        self.mixer = DeltaNet(
            **config.layer_options(),
            implementation=implementation,
            context_axis=context_axis,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"] | None,
        mask: Bool[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        x = x + self.mixer(self.mixer_norm(x), segment_ids=segment_ids, mask=mask)
        return x + self.mlp(self.mlp_norm(x))

    def extend(
        self, x: Float[Array, "B T D"], cache: DeltaNetCache, mask: Bool[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T D"], DeltaNetCache]:
        mixed, cache = self.mixer.extend(self.mixer_norm(x), cache, mask=mask)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class DeltaNetLM(nnx.Module):
    """Next-token model over a vocabulary; its memory in decoding is constant.

    Models of one config have one tree of parameters whatever the implementation, so
    `nnx.update(b, nnx.state(a))` turns one into another.

    Example:
        >>> config = DeltaNetConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2)
        >>> model = DeltaNetLM(config, rngs=nnx.Rngs(0))
        >>> model(jnp.asarray([[1, 2, 3]])).shape
        (1, 3, 9)
    """

    def __init__(
        self,
        config: DeltaNetConfig,
        *,
        implementation: Choice = None,
        context_axis: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make a model; embeddings start normal with deviation `hidden_size**-0.5`.

        Args:
            config: The shape of the model.
            implementation: Implementation of every mixer; see `linear_attention`.
            context_axis: Mesh axis that the time axis is sharded over; see `DeltaNet`.
            rngs: Source of randomness, stream `params`.
        """
        check_rngs(rngs)
        self.config = config
        D, vocab = config.hidden_size, config.vocab_size
        table = jax.random.normal(rngs.params(), (vocab, D), jnp.dtype(config.param_dtype))
        self.embedding = parameter(table * D**-0.5, (VOCAB, EMBED))
        self.blocks = nnx.List(
            Block(config, implementation=implementation, context_axis=context_axis, rngs=rngs)
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(
            D, eps=config.norm_eps, param_dtype=jnp.dtype(config.param_dtype), axis_name=EMBED
        )
        if not config.tie_embeddings:
            self.head = _projection(config, rngs)(D, vocab, (EMBED, VOCAB))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Logits of the token after each token, in float32.

        Args:
            tokens: Integers in `[0, vocab_size)`.
            segment_ids: Integers; nothing crosses a change of id.
            mask: True for real tokens; the others act as if they were absent.

        Raises:
            ValueError: If a shape or dtype is wrong; the message names the argument.
        """
        x = self._embed(tokens, mask)
        for block in self.blocks:
            x = block(x, segment_ids, mask)
        return self.logits(x)

    def init_cache(self, batch_size: int) -> LMCache:
        """The cache before the first token: one per block."""
        return tuple(block.mixer.init_cache(batch_size) for block in self.blocks)

    def extend(
        self,
        tokens: Int[Array, "B T"],
        cache: LMCache,
        *,
        mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T vocab"], LMCache]:
        """Continue from a cache with any number of tokens; return logits and the new cache."""
        x, cache = self.read(tokens, cache, mask=mask)
        return self.logits(x), cache

    def read(
        self,
        tokens: Int[Array, "B T"],
        cache: LMCache,
        *,
        mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LMCache]:
        """Run `extend` up to the last block; return its features and the new cache."""
        x, new = self._embed(tokens, mask), []
        if len(cache) != len(self.blocks):
            raise ValueError(
                f"`cache` must hold one part per block, {len(self.blocks)}; got {len(cache)}"
            )
        for block, part in zip(self.blocks, cache, strict=True):
            x, part = block.extend(x, part, mask)
            new.append(part)
        return x, tuple(new)

    def _embed(
        self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        ids = jnp.asarray(checks.integer_array("tokens", tokens, "[B, T]"))
        real = check_per_token("mask", mask, ids.shape, np.bool_)
        check_vocabulary("tokens", ids, real, self.config.vocab_size)
        if real is not None:
            ids = jnp.where(real, ids, 0)
        return compat.rows(self.embedding[...], ids).astype(self.config.compute_dtype)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T vocab"]:
        """Map features of the last block to logits, in float32."""
        x = self.norm(x)
        tied = self.config.tie_embeddings
        table = self.embedding[...].T if tied else self.head.kernel[...]
        return _wide_product(x, table.astype(x.dtype))


@jax.custom_jvp
def _wide_product(x: Float[Array, "B T D"], w: Float[Array, "D N"]) -> Float[Array, "B T N"]:
    """`x w` in the accumulation dtype, of operands in a narrower one.

    The gradients multiply a cotangent rounded to that of the operands: in float32 it would make
    products of float32 of both.
    """
    return jnp.matmul(x, w, preferred_element_type=accumulation_dtype(x))


@_wide_product.defjvp
def _wide_product_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _wide_product(*primals), linear_map(_wide_tangent, _wide_cotangents, primals, tangents)


def _wide_tangent(
    given: tuple[jax.Array, jax.Array], moved: tuple[jax.Array, jax.Array]
) -> jax.Array:
    (x, w), (dx, dw) = given, moved
    return _wide_product(dx, w) + _wide_product(x, dw)


def _wide_cotangents(
    given: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    _, pull = jax.vjp(jnp.matmul, *given)
    dx, dw = pull(cotangent.astype(given[0].dtype))
    return dx, dw


def _projection(config: DeltaNetConfig, rngs: nnx.Rngs) -> "partial[nnx.Linear]":
    return partial(
        projection,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        precision=None,
        kernel_init=nnx.initializers.lecun_normal(),
        rngs=rngs,
    )
