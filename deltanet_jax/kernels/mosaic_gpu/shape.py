"""The sizes and the variant of one call, the same for all of its kernels."""

import dataclasses

import jax
import jax.numpy as jnp

from deltanet_jax.core.problem import GateKind
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK

__all__ = ["Shape"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and variant of a call; all of it is static."""

    batch: int
    tokens: int  # a multiple of CHUNK, or 1 where one token is decoded
    heads: int  # value heads
    group: int  # value heads per key head
    key_dim: int
    value_dim: int
    dtype: jnp.dtype  # of queries, keys and values
    delta: bool
    gate: GateKind

    @classmethod
    def of(
        cls,
        *,
        q: jax.Array | jax.ShapeDtypeStruct,
        v: jax.Array | jax.ShapeDtypeStruct,
        gate: GateKind,
        delta: bool,
    ) -> "Shape":
        """Return the shape of `q` `[B, T, H, K]` and `v` `[B, T, HV, V]`; both may lack T."""
        batch, *tokens, key_heads, key_dim = q.shape
        *_, heads, value_dim = v.shape
        return cls(
            batch=batch,
            tokens=tokens[0] if tokens else 1,
            heads=heads,
            group=heads // key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=q.dtype,
            delta=delta,
            gate=gate,
        )

    @property
    def chunks(self) -> int:
        """Number of chunks of a sequence."""
        return self.tokens // CHUNK

    @property
    def scalar_gate(self) -> bool:
        """Whether every head has one gate."""
        return self.gate == "scalar"

    @property
    def vector_gate(self) -> bool:
        """Whether every key channel has a gate."""
        return self.gate == "vector"
