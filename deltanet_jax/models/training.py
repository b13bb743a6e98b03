"""Training a language model with optax."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from deltanet_jax import compat
from deltanet_jax.core import checks
from deltanet_jax.models.delta_net_lm import DeltaNetLM

try:
    import optax
except ModuleNotFoundError as error:
    raise ImportError("training needs optax: pip install 'deltanet_jax[train]'") from error

__all__ = ["bits_per_token", "make_optimizer", "next_token_loss", "train_step"]


def make_optimizer(
    model: DeltaNetLM,
    learning_rate: float,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
) -> "nnx.Optimizer[DeltaNetLM]":
    """AdamW after clipping by global norm, warm-up and cosine decay to a tenth.

    Weight decay acts on matrices alone: norms, gates and convolutions are left to move freely.

    Example:
        >>> config = DeltaNetConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2)
        >>> model = DeltaNetLM(config, rngs=nnx.Rngs(0))
        >>> optimizer = make_optimizer(model, 1e-3, total_steps=100, warmup_steps=10)
        >>> int(optimizer.step[...])
        0
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"`warmup_steps` must be in [0, total_steps={total_steps}); got {warmup_steps}"
        )
    schedule = optax.warmup_cosine_decay_schedule(
        learning_rate / max(1, warmup_steps),
        learning_rate,
        warmup_steps,
        total_steps,
        end_value=learning_rate / 10,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay, mask=_decayed),
    )
    return nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def _decayed(params: optax.Params) -> optax.Params:
    """True for the matrices of projections, embedding and head."""

    def is_matrix(path: tuple[object, ...], _: jax.Array) -> bool:
        names = [str(getattr(part, "key", part)) for part in path]
        return any(n.endswith("_proj") or n in ("embedding", "head") for n in names)

    decayed: optax.Params = jax.tree_util.tree_map_with_path(is_matrix, params)
    return decayed


def next_token_loss(
    model: DeltaNetLM,
    tokens: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Mean cross entropy, in nats, of every token given those before it in its segment.

    A target counts if it is real and in the segment of the token before it.

    Example:
        >>> config = DeltaNetConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2)
        >>> model = DeltaNetLM(config, rngs=nnx.Rngs(0))
        >>> float(next_token_loss(model, jnp.asarray([[1, 2, 3]]))) > 0
        True
    """
    if checks.integer_array("tokens", tokens, "[B, T]").shape[1] < 2:
        raise ValueError(f"`tokens` must be [B, T] with T >= 2, a target each; got {tokens.shape}")
    logits = model(tokens, segment_ids=segment_ids, mask=mask)

    # The targets move and the logits stay: whatever shards their time axis divides it still.
    def after(x: jax.Array) -> jax.Array:
        return compat.on_whole_axes(lambda y: jnp.roll(y, -1, axis=1), x)

    counted = jnp.broadcast_to(jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1, tokens.shape)
    if segment_ids is not None:
        counted &= after(segment_ids) == segment_ids
    if mask is not None:
        counted &= after(mask) & mask
    # A label outside the vocabulary, such as -100, is NaN even where it does not count.
    labels = jnp.where(counted, after(tokens), 0)
    # A comparison, and not an index: it keeps every sharding of rows, tokens and vocabulary.
    vocabulary = jnp.arange(logits.shape[-1])[None, None]
    chosen = jnp.where(vocabulary == labels[..., None], logits, 0)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(chosen, axis=-1)
    count = jnp.maximum(jnp.sum(counted), 1).astype(losses.dtype)
    return jnp.sum(losses, where=counted) / count


def bits_per_token(loss: float) -> float:
    """Convert a loss in nats to bits; for a byte-level model, bits per byte.

    Example:
        >>> bits_per_token(math.log(256))
        8.0
    """
    return loss / math.log(2)


@nnx.jit
def train_step(
    model: DeltaNetLM,
    optimizer: "nnx.Optimizer[DeltaNetLM]",
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> dict[str, Float[Array, ""]]:
    """Update in place once; return the loss before it and the norm of its gradient.

    Example:
        >>> config = DeltaNetConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2)
        >>> model = DeltaNetLM(config, rngs=nnx.Rngs(0))
        >>> optimizer = make_optimizer(model, 1e-2, total_steps=10)
        >>> tokens = jnp.asarray([[1, 2, 3, 4, 5, 6, 7, 8]])
        >>> losses = [float(train_step(model, optimizer, tokens)["loss"]) for _ in range(3)]
        >>> losses[0] > losses[-1]
        True
    """
    loss_of = partial(next_token_loss, tokens=tokens, segment_ids=segment_ids, mask=mask)
    loss, gradient = nnx.value_and_grad(loss_of)(model)
    # Optax mixes dtypes and ranks.
    compat.with_default_promotion(optimizer.update)(model, gradient)
    return {"loss": loss, "gradient_norm": optax.tree.norm(gradient)}
