"""The shape of a language model, as plain data."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax.numpy as jnp

from deltanet_jax.core import checks
from deltanet_jax.layers.checks import check_dtype
from deltanet_jax.layers.options import LayerOptions

__all__ = ["DeltaNetConfig"]

MLP_MULTIPLE = 64  # the MLP's width is rounded up to a multiple of this


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(LayerOptions):
    """Options that fix the parameters of a `DeltaNetLM`, and the dtype it computes in.

    The fields that are not listed here are those of `DeltaNet`.

    Attributes:
        vocab_size: Size of the vocabulary.
        num_layers: Blocks of a mixer and an MLP.
        norm_eps: Epsilon of all norms.
        mlp_size: Hidden width of the SwiGLU; by default 8/3 of `hidden_size`, rounded up to a
            multiple of 64.
        tie_embeddings: Whether the head is the embedding, transposed.
        dtype: Dtype of computation; by default `param_dtype`.
        param_dtype: Dtype of the parameters.

    Raises:
        ValueError: If a field has a value it cannot have; the message names it.

    Example:
        >>> config = DeltaNetConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=2)
        >>> config.mlp_width, DeltaNetConfig.from_json(config.to_json()) == config
        (192, True)
    """

    vocab_size: int
    num_layers: int
    norm_eps: float = 1e-6
    mlp_size: int | None = None
    tie_embeddings: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocab_size", "num_layers"):
            checks.whole(name, getattr(self, name), least=1)
        checks.optional(checks.whole, "mlp_size", self.mlp_size, least=1)
        checks.flag("tie_embeddings", self.tie_embeddings)
        for name in ("dtype", "param_dtype"):
            if name == "param_dtype" or self.dtype is not None:
                object.__setattr__(self, name, check_dtype(name, getattr(self, name)).name)

    def layer_options(self) -> dict[str, Any]:
        """The options of every mixer."""
        return {f.name: getattr(self, f.name) for f in fields(LayerOptions)}

    @property
    def mlp_width(self) -> int:
        """Hidden channels of the SwiGLU."""
        if self.mlp_size is not None:
            return self.mlp_size
        return -(-8 * self.hidden_size // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype or self.param_dtype)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "DeltaNetConfig":
        """The inverse of `to_dict`.

        Raises:
            ValueError: If a key is unknown or a required one is missing.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        missing = [
            n for n in ("vocab_size", "hidden_size", "num_layers", "num_heads") if n not in data
        ]
        if unknown or missing:
            raise ValueError(
                f"`data` must hold the fields of DeltaNetConfig; unknown {unknown}, "
                f"missing {missing}"
            )
        return cls(**data)  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, text: str) -> "DeltaNetConfig":
        return cls.from_dict(json.loads(text))
