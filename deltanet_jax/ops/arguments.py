"""Types of the arguments of the operators."""

from collections.abc import Sequence
from typing import TypedDict

import jax
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.dispatch import Implementation

__all__ = ["CallOptions", "Choice", "Gate", "Options", "Result", "Segments"]

Choice = Implementation | Sequence[Implementation] | None
Gate = Float[Array, "B T HV"] | Float[Array, "B T HV K"]
Segments = Int[Array, "B T"]
Result = tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]


class CallOptions(TypedDict, total=False):
    """Keywords that all operators share; `linear_attention` documents them."""

    scale: float | None
    initial_state: Float[Array, "B HV K V"] | None
    segment_ids: Segments | None
    cu_seqlens: Int[Array, " N+1"] | None
    chunk_size: int | None
    precision: jax.lax.PrecisionLike


class Options(CallOptions, total=False):
    """The same, with the choice of an implementation."""

    implementation: Choice
