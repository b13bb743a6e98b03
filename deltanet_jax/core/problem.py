"""One call in canonical form: what every implementation takes.

Everything below the public functions works on a `Problem`: arguments checked, gates in
the accumulation dtype, optional values either resolved or `None` for a static reason.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from deltanet_jax import compat
from deltanet_jax.core.numerics import accumulation_dtype

__all__ = [
    "GateKind",
    "Problem",
    "Tokens",
    "decay_with_resets",
    "start_state",
    "tokens_of",
    "zero_state",
]

# A gate this low is an exact reset: its exponential is 0 in float32 and in float64, and sums
# that contain it stay finite, which keeps -inf from turning into NaN in differences.
LOG_ZERO = -1000.0

GateKind = Literal["none", "scalar", "vector"]


class Tokens(NamedTuple):
    """The arrays that have a row for every token; `None` where a call has none.

    In a `Problem` the axes are `[B, T, H or HV, *]`, and `beta` and a scalar gate have no last
    axis. `tokens_of` gives every array a last axis, of length 1 for these two. The algebra of
    chunks takes tokens with any leading axes and time on the axis before the last.
    """

    q: Float[Array, "*B T K"]
    k: Float[Array, "*B T K"]  # the dtype of q
    v: Float[Array, "*B T V"]  # the dtype of q
    g: Float[Array, "*B T D"] | None = None  # log-decay in nats, acc; D is 1 or K
    beta: Float[Array, "*B T 1"] | None = None  # write strength, acc; None: no delta rule


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "initial_state", "reset"],
    meta_fields=["scale", "precision"],
)
@dataclass(frozen=True)
class Problem:
    """One call in canonical form; a pytree whose last two fields are static.

    Axes: `B` batch, `T` time, `H` key heads, `HV` value heads (a multiple of `H`; value head
    `h` reads key head `h // (HV // H)`), `K` key dim, `V` value dim. "acc" is the accumulation
    dtype: float64 for float64 inputs, float32 for everything else.
    """

    tokens: Tokens
    initial_state: Float[Array, "B HV K V"] | None = None  # acc; None: zeros
    reset: Bool[Array, "B T"] | None = None  # True: the state restarts from zero before the token
    scale: float = 1.0  # factor on q
    precision: jax.lax.Precision | None = None  # of products of acc operands

    @property
    def q(self) -> jax.Array:
        """Queries, `[B, T, H, K]`."""
        return self.tokens.q

    @property
    def k(self) -> jax.Array:
        """Keys, `[B, T, H, K]`."""
        return self.tokens.k

    @property
    def v(self) -> jax.Array:
        """Values, `[B, T, HV, V]`."""
        return self.tokens.v

    @property
    def g(self) -> jax.Array | None:
        """Log-decay, `[B, T, HV]` for a scalar gate, `[B, T, HV, K]` for a vector gate."""
        return self.tokens.g

    @property
    def beta(self) -> jax.Array | None:
        """Write strength, `[B, T, HV]`."""
        return self.tokens.beta

    @property
    def gate(self) -> GateKind:
        """The kind of gate, which is static."""
        if self.g is None:
            return "none"
        return "vector" if self.g.ndim == self.k.ndim else "scalar"

    def fields_beside(self, known: Collection[str]) -> tuple[str, ...]:
        """Return the names of the per-token arrays of this call that are not in `known`."""
        given = self.tokens._asdict().items()
        return tuple(name for name, x in given if x is not None and name not in known)

    def with_tokens(self, **arrays: Any) -> "Problem":
        """Return the problem with other per-token arrays under these names."""
        return replace(self, tokens=self.tokens._replace(**arrays))

    def map_tokens(self, function: Callable[[jax.Array], Any]) -> "Problem":
        """Return the problem with `function` applied to every array of `tokens`."""
        return replace(self, tokens=jax.tree.map(function, self.tokens))

    def with_repeated_keys(self) -> "Problem":
        """Return the same problem with one key head per value head; float16 keys in float32."""
        heads = self.v.shape[2]
        if heads == self.q.shape[2]:
            return self

        def repeated(x: jax.Array) -> jax.Array:
            group = heads // x.shape[2]
            if group == 1:
                return x
            # The gradients of a key head from several value heads can overflow before their sum.
            wide = x.astype(jnp.float32) if x.dtype == jnp.float16 else x
            return compat.repeat(wide, group, axis=2)

        return self.map_tokens(repeated)


def decay_with_resets(problem: Problem) -> jax.Array | None:
    """Return the log-decay with resets written into it as `LOG_ZERO`, and finite everywhere."""
    g = problem.g
    if g is not None:
        g = jnp.maximum(g, LOG_ZERO)
    if problem.reset is None:
        return g
    if g is None:
        acc = accumulation_dtype(problem.q, problem.k, problem.v)
        g = jnp.zeros(problem.v.shape[:3], acc)
    reset = jnp.expand_dims(problem.reset, tuple(range(2, g.ndim)))
    return jnp.where(reset, jnp.asarray(LOG_ZERO, g.dtype), g)


def tokens_of(problem: Problem) -> Tokens:
    """Return the tokens, time on axis 1, with resets in the gate and gates as columns."""

    def column(x: jax.Array | None) -> jax.Array | None:
        return x if x is None or x.ndim == problem.k.ndim else x[..., None]

    return problem.tokens._replace(g=column(decay_with_resets(problem)), beta=column(problem.beta))


def zero_state(problem: Problem) -> Float[Array, "B HV K V"]:
    """Return a state of zeros, on the axes of `vmap` that the values are on."""
    acc = accumulation_dtype(problem.q, problem.k, problem.v)
    nothing = jnp.sum(problem.v[:, :0].astype(acc), axis=1)  # over no token
    B, HV, V = nothing.shape
    return jnp.broadcast_to(nothing[:, :, None], (B, HV, problem.k.shape[-1], V))


def start_state(problem: Problem) -> Float[Array, "B HV K V"]:
    """Return the initial state, ready to be the carry of a scan over the problem's tokens."""
    state = problem.initial_state
    if state is None:
        state = zero_state(problem)
    state = compat.shard_like(state, problem.v, (0, 2, None, None))
    return compat.vary_like(state, *jax.tree.leaves(problem.tokens))
