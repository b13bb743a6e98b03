"""The problem in canonical form, and its single step.

Everything below the public functions works on a `Problem`: arguments checked, gates in
the accumulation dtype, optional values either resolved or `None` for a static reason.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from deltanet_jax import compat

__all__ = ["Problem", "accumulation_dtype", "decay_with_resets", "dot", "start_state", "step"]

# A gate this low is an exact reset: its exponential is 0 in float32 and in float64, and sums
# that contain it stay finite, which keeps -inf from turning into NaN in differences.
LOG_ZERO = -1000.0


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "k", "v", "g", "beta", "initial_state", "reset"],
    meta_fields=["scale", "precision"],
)
@dataclass(frozen=True)
class Problem:
    """One call of the family in canonical form; a pytree whose last two fields are static.

    Axes: `B` batch, `T` time, `H` key heads, `HV` value heads (a multiple of `H`; value head
    `h` reads key head `h // (HV // H)`), `K` key dim, `V` value dim. "acc" is the accumulation
    dtype: float64 for float64 inputs, float32 for everything else.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]  # the dtype of q
    v: Float[Array, "B T HV V"]  # the dtype of q
    g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None  # log-decay in nats, acc
    beta: Float[Array, "B T HV"] | None  # write strength, acc; None: no delta rule
    initial_state: Float[Array, "B HV K V"] | None  # acc; None: zeros
    reset: Bool[Array, "B T"] | None  # True: the state restarts from zero before this token
    scale: float  # factor on q
    precision: jax.lax.Precision | None  # of products of acc operands

    def with_repeated_keys(self) -> "Problem":
        """The same problem with one key head per value head."""
        group = self.v.shape[2] // self.q.shape[2]
        if group == 1:
            return self
        return replace(
            self,
            q=compat.repeat(self.q, group, axis=2),
            k=compat.repeat(self.k, group, axis=2),
        )


def accumulation_dtype(*arrays: jax.Array) -> jnp.dtype:
    """float64 if any array is, else float32."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def dot(
    equation: str, x: jax.Array, y: jax.Array, precision: jax.lax.Precision | None
) -> jax.Array:
    """`einsum` that accumulates in float32 or wider.

    Two 16-bit operands are multiplied as they are. A 16-bit operand beside a wider one is
    widened: on hardware with reduced-precision matrix units, `precision` decides what
    happens then, and nothing can overflow the narrower type.
    """
    acc = accumulation_dtype(x, y)
    if x.dtype != y.dtype:
        x, y = x.astype(acc), y.astype(acc)
    if x.dtype != acc:
        precision = None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=acc)


def decay_with_resets(problem: Problem) -> jax.Array | None:
    """The log-decay with resets written into it as `LOG_ZERO`, and finite everywhere."""
    g = problem.g
    if g is not None:
        g = jnp.maximum(g, LOG_ZERO)
    if problem.reset is None:
        return g
    reset = problem.reset[..., None]
    if g is None:
        acc = accumulation_dtype(problem.q, problem.k, problem.v)
        g = jnp.zeros(problem.v.shape[:3], acc)
    elif g.ndim == 4:
        reset = reset[..., None]
    return jnp.where(reset, jnp.asarray(LOG_ZERO, g.dtype), g)


def start_state(problem: Problem) -> Float[Array, "B HV K V"]:
    """The initial state, ready to be the carry of a scan over the problem's tokens."""
    state = problem.initial_state
    if state is None:
        B, _, HV, V = problem.v.shape
        acc = accumulation_dtype(problem.q, problem.k, problem.v)
        state = jnp.zeros((B, HV, problem.k.shape[-1], V), acc)
    state = compat.shard_like(state, problem.v, (0, 2, None, None))
    return compat.vary_like(state, problem.q, problem.k, problem.v, problem.g, problem.beta)


def step(
    state: Float[Array, "*B K V"],
    q: Float[Array, "*B K"],
    k: Float[Array, "*B K"],
    v: Float[Array, "*B V"],
    g: Float[Array, "*B"] | Float[Array, "*B K"] | None,
    beta: Float[Array, "*B"] | None,
) -> tuple[Float[Array, "*B V"], Float[Array, "*B K V"]]:
    """One token: decay, then read the error, then write; the scale is the caller's.

    ::

        S = Diag(exp(g)) S
        S = S + k^T (beta (v - k S))        without the delta rule: S + k^T v
        o = q S
    """
    q, k, v = (x.astype(state.dtype) for x in (q, k, v))
    if g is not None:
        decay = jnp.exp(g)
        state = state * (decay[..., None] if g.ndim == k.ndim else decay[..., None, None])
    if beta is not None:
        v = beta[..., None] * (v - _read(k, state))
    state = state + k[..., :, None] * v[..., None, :]
    return _read(q, state), state


def _read(x: Float[Array, "*B K"], state: Float[Array, "*B K V"]) -> Float[Array, "*B V"]:
    """`x S` in full precision: a rounded read would be written back into the state."""
    return jnp.einsum("...k,...kv->...v", x, state, precision=jax.lax.Precision.HIGHEST)
