"""Chunks of the cases, as the algebra of one chunk takes them."""

import jax
import jax.numpy as jnp

from deltanet_jax.core.problem import Tokens
from tests.cases import VARIANTS, Inputs, Shape, correlated, weak_decay


def chunk_of(variant: str, C: int) -> tuple[Inputs, Tokens, jax.Array]:
    """Inputs of one sequence, the same as a chunk `[2, C, *]`, and its incoming state."""
    family = weak_decay if VARIANTS[variant].gate != "none" else correlated
    inputs = family(variant, Shape(1, C, 2, 6, 4))
    rows = [inputs.get(name) for name in ("q", "k", "v", "g", "beta")]
    rows = [None if x is None else x[..., None] if x.ndim == 3 else x for x in rows]
    chunk = Tokens(*(None if x is None else jnp.asarray(x[0]).swapaxes(0, 1) for x in rows))
    return inputs, chunk, jnp.asarray(inputs["initial_state"][0])
