"""The options of a layer, checked once; every message names the argument."""

import math
from dataclasses import dataclass

import jax

from deltanet_jax.core import checks
from deltanet_jax.layers.features import FEATURE_MAPS, feature_dim
from deltanet_jax.layers.norms import NORMS
from deltanet_jax.ops.api import Choice
from deltanet_jax.ops.canonical import canonical_chunk_size
from deltanet_jax.ops.dispatch import check_name

__all__ = ["GATES", "OUTPUT_GATES", "LayerOptions", "check_implementation"]

GATES = ("none", "scalar", "vector")
OUTPUT_GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def check_implementation(implementation: Choice) -> Choice:
    """An implementation, with a sequence as a tuple so that it can be a static attribute."""
    if isinstance(implementation, list | tuple):
        if not implementation:
            raise ValueError("`implementation` must name at least one candidate; got none")
        for one in implementation:
            check_name(one)
        return tuple(implementation)
    if implementation is not None:
        check_name(implementation)
    return implementation


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of a `DeltaNet`, which documents the fields."""

    hidden_size: int
    num_heads: int
    head_dim: int | None = None
    expand_v: float = 1.0
    num_v_heads: int | None = None
    gate: str = "none"
    use_beta: bool = True
    allow_neg_eigval: bool = False
    conv_size: int | None = 4
    feature_map: str = "silu"
    dpfp_nu: int = 1
    qk_norm: str = "l2"
    use_output_gate: bool = False
    output_gate_activation: str = "silu"
    norm_eps: float = 1e-5
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "dpfp_nu"):
            checks.whole(name, getattr(self, name), least=1)
        for name in ("head_dim", "num_v_heads", "conv_size"):
            checks.optional(checks.whole, name, getattr(self, name), least=1)
        for name in ("use_beta", "allow_neg_eigval", "use_output_gate"):
            checks.flag(name, getattr(self, name))
        checks.choice("gate", self.gate, GATES)
        checks.choice("feature_map", self.feature_map, tuple(FEATURE_MAPS))
        checks.choice("qk_norm", self.qk_norm, tuple(NORMS))
        checks.choice("output_gate_activation", self.output_gate_activation, tuple(OUTPUT_GATES))
        canonical_chunk_size(self.chunk_size)
        for name in ("expand_v", "norm_eps"):
            checks.number(name, getattr(self, name), above=0)
        self._check_heads()

    def _check_heads(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                "`hidden_size` must be a multiple of `num_heads` unless `head_dim` is given; "
                f"got {self.hidden_size} and {self.num_heads}"
            )
        if self.value_heads % self.num_heads:
            raise ValueError(
                "`num_v_heads` must be a multiple of `num_heads`; "
                f"got {self.num_v_heads} and {self.num_heads}"
            )
        wanted = self.width * self.expand_v
        if not 0.5 <= wanted < math.inf or abs(wanted - round(wanted)) > 1e-6:
            raise ValueError(
                "`expand_v` times the head dim must be a positive whole number; "
                f"got {self.expand_v!r} times {self.width}"
            )

    @property
    def width(self) -> int:
        """Channels per key head before the feature map."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def value_heads(self) -> int:
        return self.num_v_heads or self.num_heads

    @property
    def key_dim(self) -> int:
        """`K`: features per key head."""
        return feature_dim(self.feature_map, self.width, self.dpfp_nu)

    @property
    def value_dim(self) -> int:
        """`V`: channels per value head."""
        return round(self.width * self.expand_v)
