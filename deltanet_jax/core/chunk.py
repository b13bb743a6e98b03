"""The algebra of one chunk, on arrays `[..., C, *]` with any leading axes.

Incoming state `S`, rows `i` of a chunk of `C` tokens, cumulative log-decay `b`::

    (I + L) [W | U] = beta * [k*exp(b) | v],   L = stril(beta_i P(k,k)_ij)
    U~ = U - W S
    O  = (q*exp(b)) S + tril(P(q,k)) U~
    S' = Diag(exp(b_C)) S + (k*exp(b_C - b))^T U~

Without the delta rule `W` is absent and `U~ = v`. Derivations: `docs/mathematics.md`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.core.affine import AffineMap
from deltanet_jax.core.decay import decay_from_start, decay_to_end, scores, total_decay
from deltanet_jax.core.numerics import dot, identity
from deltanet_jax.core.problem import Tokens
from deltanet_jax.core.triangular import unit_lower_solve

__all__ = [
    "WYForm",
    "chunk_map",
    "prepare_wy",
    "read",
    "scale",
    "system_of",
    "write",
]

Precision = jax.lax.Precision | None


def scale(x: jax.Array, decay: jax.Array | None) -> jax.Array:
    """`x` times its decay, where there is a gate."""
    return x if decay is None else x.astype(decay.dtype) * decay


def system_of(
    chunk: Tokens, beta: Float[Array, "*B C 1"], precision: Precision
) -> Float[Array, "*B C C"]:
    """`L = stril(beta_i P(k,k)_ij)`."""
    return beta * scores(chunk.k, chunk.k, chunk.g, strict=True, precision=precision)


class WYForm(NamedTuple):
    """Form 2: everything that does not depend on the state is ready; two products remain."""

    W: Float[Array, "*B C K"] | None  # None: no delta rule
    U: Float[Array, "*B C V"]
    keys: Float[Array, "*B C K"]  # k*exp(b_C - b)
    total: Float[Array, "*B D 1"] | None  # exp(b_C)

    def writes(self, state: Float[Array, "*B K V"], precision: Precision) -> jax.Array:
        """`U~ = U - W S`."""
        if self.W is None:
            return self.U
        return self.U - dot("...ck,...kv->...cv", self.W, state, precision)

    def advance(
        self, state: Float[Array, "*B K V"], writes: Float[Array, "*B C V"], precision: Precision
    ) -> Float[Array, "*B K V"]:
        """`S' = Diag(exp(b_C)) S + (k*exp(b_C - b))^T U~`."""
        return scale(state, self.total) + dot("...ck,...cv->...kv", self.keys, writes, precision)


def prepare_wy(chunk: Tokens, precision: Precision) -> WYForm:
    """Form 2 of a chunk; also the only form of a variant without the delta rule."""
    keys, total = scale(chunk.k, decay_to_end(chunk.g)), total_decay(chunk.g)
    if chunk.beta is None:
        return WYForm(None, chunk.v, keys, total)
    keys_in = scale(chunk.k, decay_from_start(chunk.g))
    L = system_of(chunk, chunk.beta, precision)
    W, U = unit_lower_solve(L, (scale(keys_in, chunk.beta), scale(chunk.v, chunk.beta)))
    return WYForm(W, U, keys, total)


def write(
    chunk: Tokens,
    state: Float[Array, "*B K V"],
    writes: Float[Array, "*B C V"],
    precision: Precision,
) -> Float[Array, "*B K V"]:
    """`S' = Diag(exp(b_C)) S + (k*exp(b_C - b))^T U~`."""
    keys_out = scale(chunk.k, decay_to_end(chunk.g))
    new = dot("...ck,...cv->...kv", keys_out, writes, precision)
    return scale(state, total_decay(chunk.g)) + new


def read(
    chunk: Tokens,
    state: Float[Array, "*B K V"],
    writes: Float[Array, "*B C V"],
    precision: Precision,
) -> Float[Array, "*B C V"]:
    """`O = (q*exp(b)) S + tril(P(q,k)) U~`."""
    queries = scale(chunk.q, decay_from_start(chunk.g))
    past = dot("...ck,...kv->...cv", queries, state, precision)
    inside = scores(chunk.q, chunk.k, chunk.g, strict=False, precision=precision)
    return past + dot("...ij,...jv->...iv", inside, writes, precision)


def chunk_map(form: WYForm, precision: Precision) -> AffineMap:
    """The map of a whole chunk: `M = Diag(exp(b_C)) - keys^T W`, `R = keys^T U`."""
    R = dot("...ck,...cv->...kv", form.keys, form.U, precision)
    total = jnp.ones((1,) * R.ndim, R.dtype) if form.total is None else form.total
    if form.W is None:
        return AffineMap(jnp.broadcast_to(total, (*R.shape[:-1], 1)), R)
    erase = dot("...ck,...cj->...kj", form.keys, form.W, precision)
    return AffineMap(total * identity(R) - erase, R)
