"""What a layer carries from one piece of a sequence to the next."""

from typing import NamedTuple

from jaxtyping import Array, Float

__all__ = ["DeltaNetCache"]


class DeltaNetCache(NamedTuple):
    """Constant in size, whatever the number of tokens read; a pytree.

    The convolutions' parts are their last `W - 1` inputs, and `None` without convolutions.
    """

    state: Float[Array, "B HV K V"]  # float32
    q_inputs: Float[Array, "B W-1 HD"] | None = None
    k_inputs: Float[Array, "B W-1 HD"] | None = None
    v_inputs: Float[Array, "B W-1 HVV"] | None = None
