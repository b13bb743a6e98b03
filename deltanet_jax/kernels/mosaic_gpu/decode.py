"""The kernel of one token: it reads the state once and writes it once.

A thread block holds some columns of one head's state in registers: all of their rows, so that both
reads, `k S` and `q S`, are sums over what is there. Nothing passes through shared memory but
those sums. All loads of a thread block are in flight at once, and several thread blocks share an
SM, which hides the latency of the memory.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax import compat
from deltanet_jax.core.problem import GateKind
from deltanet_jax.kernels.mosaic_gpu.blocks import launches, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.pipeline import unravel
from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.tuning import config_of, sm_count

__all__ = ["advance"]

WARPS, LANES = 4, 32  # of a thread block
VECTOR = 4  # floats in one access


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch; a thread block has `width` columns of one head."""

    shape: Shape
    scale: float

    @property
    def width(self) -> int:
        """Wide parts of rows, unless that would leave SMs without a thread block."""
        wide = config_of("decode", self.shape, full=True).width
        programs = self.shape.batch * self.shape.heads * self.shape.value_dim // wide
        return config_of("decode", self.shape, full=programs >= sm_count()).width

    @property
    def part(self) -> tuple[int, int]:
        """Shape of a thread block's part of the state."""
        return self.shape.key_dim, self.width

    @property
    def layout(self) -> smem.Layout:
        """Every thread holds four columns of a few rows; a warp reads whole rows of its part."""
        lanes = self.width // VECTOR  # along a row
        rows = self.shape.key_dim // (WARPS * (LANES // lanes))
        tiling = plgpu.Tiling(
            (self.part, (self.shape.key_dim // WARPS, self.width), (rows, VECTOR))
        )
        return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-4, -3), vector_dim=-1)


class Inputs(NamedTuple):
    """Arrays of one token."""

    q: Ref  # [B, H, K]
    k: Ref  # [B, H, K]
    v: Ref  # [B, HV, V]
    g: Ref  # [B, HV] or [B, HV, K], float32; `None` without a gate
    beta: Ref  # [B, HV] float32; `None` without the delta rule


class Results(NamedTuple):
    """The output, and the next state where it does not take the place of the state."""

    o: Ref  # [B, HV, V]
    new_state: Ref  # [B, HV, K, V] float32


def _body(plan: Plan, refs: Inputs, old_state: Ref, out: Results) -> None:
    item, parts = lax.axis_index("program"), plan.shape.value_dim // plan.width
    columns = pl.ds(lax.rem(item, parts) * plan.width, plan.width)
    batch, head = unravel(lax.div(item, parts), plan.shape.heads)
    key_head = lax.div(head, plan.shape.group)

    def load(ref: Ref, layout: smem.Layout) -> jax.Array:
        return smem.load(ref, layout, optimized=False).astype(jnp.float32)

    def over_rows(x: jax.Array) -> jax.Array:
        """`x[i]` at every `[i, j]`."""
        return smem.cast(lax.broadcast_in_dim(x, plan.part, [0]), plan.layout)

    def over_columns(x: jax.Array) -> jax.Array:
        """`x[j]` at every `[i, j]`."""
        return smem.cast(lax.broadcast_in_dim(x, plan.part, [1]), plan.layout)

    row, column = plan.layout.reduce(1), plan.layout.reduce(0)
    state = load(old_state.at[batch, head, :, columns], plan.layout)
    k = over_rows(load(refs.k.at[batch, key_head], row))
    q = over_rows(load(refs.q.at[batch, key_head], row))
    written = load(refs.v.at[batch, head, columns], column)
    if plan.shape.scalar_gate:
        state *= jnp.exp(refs.g[batch, head])
    elif plan.shape.vector_gate:
        state *= over_rows(jnp.exp(load(refs.g.at[batch, head], row)))
    if plan.shape.delta:
        written = refs.beta[batch, head] * (written - jnp.sum(k * state, axis=0))
    state += k * over_columns(written)
    target = old_state if out.new_state is None else out.new_state
    target.at[batch, head, :, columns][...] = state
    o = plan.scale * jnp.sum(q * state, axis=0)
    out.o.at[batch, head, columns][...] = o.astype(out.o.dtype)


def advance(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array | None,
    state: jax.Array,
    *,
    scale: float,
    in_place: bool,
    interpret: object = None,
) -> tuple[jax.Array, jax.Array]:
    """One token.

    Args:
        q: `[B, H, K]`.
        k: `[B, H, K]`.
        v: `[B, HV, V]`.
        g: Log-decay `[B, HV]` or `[B, HV, K]`, float32, or `None`.
        beta: `[B, HV]` float32, or `None` without the delta rule.
        state: `[B, HV, K, V]` float32.
        scale: Factor on `q`.
        in_place: Whether the next state takes the place of `state`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The output `[B, HV, V]` in the dtype of `v`, and the next state.
    """
    gates: dict[int, GateKind] = {2: "scalar", 3: "vector"}
    gate = "none" if g is None else gates[g.ndim]
    plan = Plan(shape=Shape.of(q=q, v=v, gate=gate, delta=beta is not None), scale=scale)
    inputs = Inputs(q, k, v, g, beta)
    values, next_state = (compat.type_like(x, x.shape, x.dtype) for x in (v, state))
    outputs = Results(values, None if in_place else next_state)
    kernel = launches.overwriting(
        "decode",
        functools.partial(_body, plan),
        outputs,
        programs=plan.shape.batch * plan.shape.heads * (plan.shape.value_dim // plan.width),
        interpret=interpret,
    )
    if not in_place:
        o, new_state = kernel(inputs, state)
        return o, new_state
    new_state, (o, _) = launches.run_over(kernel, inputs, state, outputs)
    return o, new_state
