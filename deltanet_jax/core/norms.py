"""Norms of rows that neither overflow nor divide by zero."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from deltanet_jax.core.linear import linear_map
from deltanet_jax.core.numerics import accumulation_dtype

__all__ = ["l2_norm", "safe_factor", "unit_rows"]

L2_EPS = 1e-6
# A power of two, so that nothing is rounded, by which squares stay in float32.
SMALL = 2.0**-80
FINITE = float(np.finfo(np.float32).max)
LARGE = 2.0**48  # elements of rows whose sums are scaled


def safe_factor(x: Float[Array, "*B K"]) -> Float[Array, "*B 1"]:
    """Return what each row is multiplied by before it is summed: 1 unless it is large.

    It has no gradient.
    """
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=-1, keepdims=True, initial=0.0)
    return jnp.where(largest > LARGE, SMALL, 1.0).astype(x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def unit_rows(
    x: Float[Array, "*B K"], scale: Float[Array, " K"] | None, eps: float
) -> Float[Array, "*B K"]:
    """`x / sqrt(sum(x^2) + eps) * scale` in the accumulation dtype, also where sums overflow.

    For the backward pass the input is kept, in its own dtype, and two numbers a row.
    """
    return _unit_rows(x, scale, eps)[0]


def _unit_rows(
    x: jax.Array, scale: jax.Array | None, eps: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The result, and the two factors that made unit rows of `x`."""
    wide = x.astype(accumulation_dtype(x))
    # Two sums in one pass over the row; with a maximum first there would be two passes.
    small = wide * SMALL
    squares, small = (jnp.sum(y * y, axis=-1, keepdims=True) for y in (wide, small))
    overflows = squares > FINITE
    factor = jnp.where(overflows, SMALL, 1.0).astype(wide.dtype)
    # Where the sum overflows no epsilon counts.
    rate = jax.lax.rsqrt(jnp.where(overflows, small, squares + eps))
    wide = wide * factor
    unit = wide * rate
    return (unit if scale is None else unit * _columns(scale, unit)), (factor, rate)


def _columns(scale: jax.Array, like: jax.Array) -> jax.Array:
    """Return `scale [K]` in the dtype and rank of `like`."""
    return jnp.expand_dims(scale.astype(like.dtype), tuple(range(like.ndim - 1)))


class _Row(NamedTuple):
    """Arrays that the derivative reads; `unit = x * factor * rate`."""

    x: jax.Array
    scale: jax.Array | None
    factor: jax.Array
    rate: jax.Array

    def unit(self) -> jax.Array:
        return self.x.astype(self.rate.dtype) * self.factor * self.rate

    def move(self, unit: jax.Array, dx: jax.Array) -> jax.Array:
        """`dx` through the unit rows: `r (dx - y (y . dx))`, which is its own transpose."""
        along = jnp.sum(unit * dx, axis=-1, keepdims=True)
        return (dx - unit * along) * self.rate * self.factor


@unit_rows.defjvp
def _unit_rows_jvp(
    eps: float, primals: tuple[jax.Array, Any], tangents: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array]:
    y, factors = _unit_rows(*primals, eps)
    return y, linear_map(_tangent, _cotangents, _Row(*primals, *factors), tangents)


def _tangent(row: _Row, moved: tuple[jax.Array, jax.Array | None]) -> jax.Array:
    dx, d_scale = moved
    unit = row.unit()
    dy = row.move(unit, dx.astype(unit.dtype))
    if row.scale is None or d_scale is None:
        return dy
    return dy * _columns(row.scale, dy) + unit * _columns(d_scale, dy)


def _cotangents(row: _Row, d_y: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    unit = row.unit()
    if row.scale is None:
        return row.move(unit, d_y).astype(row.x.dtype), None
    d_scale = jnp.sum(unit * d_y, axis=tuple(range(unit.ndim - 1)))
    dx = row.move(unit, d_y * _columns(row.scale, d_y))
    return dx.astype(row.x.dtype), d_scale.astype(row.scale.dtype)


def l2_norm(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """Scale rows to unit length; a zero row stays zero, with a finite gradient.

    Computed and returned in float32 (float64 for float64 inputs).

    Example:
        >>> l2_norm(jnp.asarray([[3.0, 4.0], [0.0, 0.0]])).round(3)
        Array([[0.6, 0.8],
               [0. , 0. ]], dtype=float32)
    """
    y: jax.Array = _l2_norm(x)
    return y


@partial(jax.jit, inline=True)  # outside of `jit` one program, and not one per operation
def _l2_norm(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    return unit_rows(x, None, L2_EPS)
