"""Affine maps of the state, `S -> A S + B`, and the one operator that composes them.

Every variant is `S_t = A_t S_{t-1} + B_t`. The operator below serves at every
level: tokens (the associative scan), chunks, pieces of one sequence, devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.core.numerics import identity

__all__ = ["AffineMap", "apply", "compose", "token_maps"]


class AffineMap(NamedTuple):
    """`S -> A S + B`. An `A` whose last axis is 1 stands for `Diag(A)`: no delta rule."""

    A: Float[Array, "*B K D"]
    B: Float[Array, "*B K V"]


def _left_multiply(A: jax.Array, X: jax.Array, precision: jax.lax.Precision | None) -> jax.Array:
    if A.shape[-1] == 1:
        return A * X
    return jnp.matmul(A, X, precision=precision)


def apply(
    map_: AffineMap, state: Float[Array, "*#B K V"], precision: jax.lax.Precision | None
) -> Float[Array, "*#B K V"]:
    """`A S + B`."""
    return _left_multiply(map_.A, state, precision) + map_.B


def compose(earlier: AffineMap, later: AffineMap, precision: jax.lax.Precision | None) -> AffineMap:
    """`(A1, B1) . (A2, B2) = (A2 A1, A2 B1 + B2)`: associative, not commutative."""
    return AffineMap(
        _left_multiply(later.A, earlier.A, precision), apply(later, earlier.B, precision)
    )


def token_maps(
    k: Float[Array, "*B K"],
    v: Float[Array, "*B V"],
    g: Float[Array, "*B D"] | None,
    beta: Float[Array, "*B 1"] | None,
) -> AffineMap:
    """The map of one token.

    ::

        A = (I - beta k^T k) Diag(a)    B = beta k^T v
        A = Diag(a)                     B = k^T v         without the delta rule
    """
    column = k[..., :, None]
    decay = jnp.ones_like(column) if g is None else jnp.exp(g)[..., :, None]
    if beta is None:
        return AffineMap(jnp.broadcast_to(decay, column.shape), column * v[..., None, :])
    weighted = beta[..., None] * k[..., None, :]
    erase = identity(column) - column * weighted
    return AffineMap(erase * jnp.swapaxes(decay, -1, -2), column * (beta * v)[..., None, :])
