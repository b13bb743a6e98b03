"""The problem in canonical form, and its single step.

Everything below the public functions works on a `Problem`: arguments checked, gates in
the accumulation dtype, optional values either resolved or `None` for a static reason.
"""

from typing import NamedTuple

import jax

__all__ = ["Problem"]


class Problem(NamedTuple):
    """One call of the family in canonical form.

    Axes: `B` batch, `T` time, `H` key heads, `HV` value heads (a multiple of `H`; value head
    `h` reads key head `h // (HV // H)`), `K` key dim, `V` value dim. "acc" is the accumulation
    dtype: float64 for float64 inputs, float32 for everything else.
    """

    q: jax.Array  # [B, T, H, K]
    k: jax.Array  # [B, T, H, K], the dtype of q
    v: jax.Array  # [B, T, HV, V]
    g: jax.Array | None  # natural log-decay, acc, [B, T, HV] or [B, T, HV, K]
    beta: jax.Array | None  # write strength, acc, [B, T, HV]; None: no delta rule
    initial_state: jax.Array | None  # acc, [B, HV, K, V]; None: zeros
    reset: jax.Array | None  # bool, [B, T]: the state restarts from zero before this token
    scale: float  # factor on q
    precision: jax.lax.Precision | None  # of products of acc operands
