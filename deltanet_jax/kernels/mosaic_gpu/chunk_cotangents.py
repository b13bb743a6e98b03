"""Gradients of the results of `decayed_chunks`, for all chunks in parallel.

Rows of one chunk, `S` its incoming state, `G = dL/dS'` of its outgoing state over `scale`, `u` its
corrected values (`v` without the delta rule)::

    dqueries = scale * do S^T        dscores   = scale * tril(do u^T) beta_j
    dkeys    = -dv S^T               doverlaps = -stril(dv u^T) beta_j
    dwrites  = scale * beta_i u G^T  dkept     = scale * rowsum(S * G)
    dbeta    = diag(dv u^T) / beta

and where beta is small::

    dbeta = scale * (rowsum(writes * (u G^T)) + diag(scores^T tril(do u^T)))
            - diag(overlaps^T stril(dv u^T))
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import state_planes
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, launches, mma, smem
from deltanet_jax.kernels.mosaic_gpu.chunk_gradients import SMALL_BETA
from deltanet_jax.kernels.mosaic_gpu.chunk_plan import decayed_shapes
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["chunk_cotangents"]

WIDTH = 64  # channels at a time
SQUARE = (CHUNK, CHUNK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Static values of a launch; a thread block has one chunk of one head."""

    shape: Shape
    interpret: bool
    scale: float

    @property
    def values(self) -> tuple[str, ...]:
        return ("do", "u") + ("dv",) * self.shape.delta

    @property
    def planes(self) -> tuple[str, ...]:
        return state_planes.planes_of(self.shape.value_dim)

    @property
    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        outputs = decayed_shapes(self.shape)
        if self.shape.delta:
            outputs |= {"overlaps": outputs["scores"]}
            vector = (self.shape.batch, self.shape.chunks, self.shape.heads, CHUNK)
            outputs |= {"beta": jax.ShapeDtypeStruct(vector, jnp.float32)}
        return outputs


def _scratch(plan: Plan):
    tile = functools.partial(smem.tile, dtype=plan.shape.dtype)
    buffers = dict.fromkeys(plan.values, tile(CHUNK, plan.shape.value_dim))
    buffers |= {
        "state": tile(WIDTH, plan.shape.value_dim),
        "dstate": tile(plan.shape.value_dim, WIDTH),
    }
    # Every one of these holds several squares in turn, of pairs or of 64 channels.
    buffers |= dict.fromkeys(("first", "second", "third"), tile(*SQUARE))
    buffers |= {"kept": plgpu.SMEM((WIDTH,), jnp.float32)}
    loaded = {
        "values": plgpu.Barrier(num_arrivals=len(plan.values) + 2 * plan.shape.delta),
        "states": plgpu.Barrier(num_arrivals=1 + len(plan.planes)),
    }
    if plan.shape.delta:
        buffers |= {"beta": plgpu.SMEM((CHUNK,), jnp.float32)}
        buffers |= {"beta_column": plgpu.SMEM((CHUNK,), jnp.float32)}
        loaded |= {"third": plgpu.Barrier()}
    return buffers, loaded


def _settle() -> None:
    """Wait until all warps are past their products, and no store reads shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _dot_rows(x, y) -> jax.Array:
    """`rowsum(x * y)` of two tiles; small squares keep registers free."""
    parts = [(slice(None), pl.ds(i, CHUNK)) for i in range(0, x.shape[1], CHUNK)]
    return sum((smem.matrix(x.at[at]) * smem.matrix(y.at[at])).sum(axis=1) for at in parts)


def _pairs(plan: Plan, refs, buffers, loaded, place, name: str, x: jax.Array, factor: float):
    """Store `factor * x * beta_j`; return the diagonal of `forward^T x`, with the delta rule."""
    weighted = x * factor
    if "beta" in buffers:
        weighted *= smem.over_columns(smem.column(buffers["beta_column"]), SQUARE)
        _settle()
        plgpu.copy_gmem_to_smem(refs[f"{name}_of"].at[place], buffers["third"], loaded["third"])
        buffers["first"][...] = x.astype(buffers["first"].dtype)
    buffers["second"][...] = weighted.astype(buffers["second"].dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers["second"], refs[name].at[place])
    if "beta" not in buffers:
        return None
    plgpu.barrier_wait(loaded["third"])
    pair = smem.transposed(buffers["third"]), buffers["first"]
    return lanes.diagonal(mma.product(SQUARE, pair), interpret=plan.interpret)


def _body(plan: Plan, names, *args):
    *refs, buffers, loaded = args
    refs = dict(zip(names, refs, strict=True))
    item = lax.axis_index("program")
    head, item = lax.rem(item, plan.shape.heads), lax.div(item, plan.shape.heads)
    place = batch, chunk, head = (
        lax.div(item, plan.shape.chunks),
        lax.rem(item, plan.shape.chunks),
        head,
    )
    tokens = pl.ds(chunk * CHUNK, CHUNK)

    def load_states(at):
        channels = pl.ds(at * WIDTH, WIDTH)
        state = refs["state"].at[(*place, channels)]
        plgpu.copy_gmem_to_smem(state, buffers["state"], loaded["states"])
        sources = [refs[name] for name in plan.planes]
        own = batch, tokens, head, channels
        state_planes.load_planes(sources, own, buffers["dstate"], loaded["states"])

    for name in plan.values:
        values = refs[name].at[batch, tokens, head]
        plgpu.copy_gmem_to_smem(values, buffers[name], loaded["values"])
    if plan.shape.delta:
        for name in ("beta", "beta_column"):
            plgpu.copy_gmem_to_smem(refs["beta_of"].at[place], buffers[name], loaded["values"])
    load_states(0)
    plgpu.barrier_wait(loaded["values"])
    right = smem.transposed(buffers["u"])
    pairs = functools.partial(_pairs, plan, refs, buffers, loaded, place)
    y = lanes.masked(mma.product(SQUARE, (buffers["do"], right)), interpret=plan.interpret)
    diagonal = pairs("scores", y, plan.scale)
    dbeta = jnp.zeros((CHUNK,), jnp.float32)
    beta = None
    if plan.shape.delta:
        x = mma.product(SQUARE, (buffers["dv"], right))
        x = lanes.masked(x, operator.gt, interpret=plan.interpret)
        dbeta = plan.scale * diagonal - pairs("overlaps", x, -1.0)
        beta = smem.row(buffers["beta"])

    def step(at, dbeta):
        channels = pl.ds(at * WIDTH, WIDTH)
        own = batch, tokens, head, channels
        _settle()
        if plan.shape.delta:
            plgpu.copy_gmem_to_smem(refs["writes_of"].at[own], buffers["third"], loaded["third"])
        plgpu.barrier_wait(loaded["states"])
        kept = state_planes.dot_rows(buffers["state"], buffers["dstate"], interpret=plan.interpret)
        buffers["kept"][...] = plan.scale * kept
        state = smem.transposed(buffers["state"])
        read = mma.product(SQUARE, (buffers["do"], state))
        buffers["first"][...] = (plan.scale * read).astype(plan.shape.dtype)
        if plan.shape.delta:
            erased = mma.product(SQUARE, (buffers["dv"], state))
            buffers["second"][...] = (-erased).astype(plan.shape.dtype)
        written = plan.scale * mma.product(SQUARE, (buffers["u"], buffers["dstate"]))
        if plan.shape.delta:
            plgpu.barrier_wait(loaded["third"])
            dbeta += (smem.matrix(buffers["third"]) * written).sum(axis=1)
            written *= smem.over_rows(beta, SQUARE)
            plgpu.commit_smem()
        buffers["third"][...] = written.astype(plan.shape.dtype)
        plgpu.commit_smem()
        pl.when((at + 1) * WIDTH < plan.shape.key_dim)(lambda: load_states(at + 1))
        plgpu.copy_smem_to_gmem(buffers["first"], refs["queries"].at[own])
        plgpu.copy_smem_to_gmem(buffers["third"], refs["writes"].at[own])
        if plan.shape.delta:
            plgpu.copy_smem_to_gmem(buffers["second"], refs["keys"].at[own])
        plgpu.copy_smem_to_gmem(buffers["kept"], refs["kept"].at[(*place, channels)])
        return dbeta

    dbeta = lax.fori_loop(0, plan.shape.key_dim // WIDTH, step, dbeta)
    if plan.shape.delta:
        exact = _dot_rows(buffers["dv"], buffers["u"]) / jnp.maximum(beta, SMALL_BETA)
        buffers["beta"][...] = jnp.where(beta > SMALL_BETA, exact, dbeta)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffers["beta"], refs["beta"].at[place])
    plgpu.wait_smem_to_gmem(0)


def chunk_cotangents(
    shape: Shape, made, beta, u, do, dv, states, cotangents, *, scale, interpret=None
):
    """Compute gradients of the results of `decayed_chunks`, and of beta.

    Args:
        shape: Sizes and variant of the call.
        made: `writes`, `scores` and `overlaps` by name.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule; then only the next five
            count, without `dv`.
        u: Corrected values (the values themselves without the delta rule), `[B, T, HV, V]`.
        do: Gradient of the outputs, `[B, T, HV, V]`.
        dv: Gradient of the values, `[B, T, HV, V]`.
        states: State entering each chunk, `[B, N, HV, K, V]`.
        cotangents: Gradient of the state leaving each chunk, over `scale`: the `planes` by name,
            each `[B, T, HV, K]`.
        scale: Factor on `q`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        A dictionary: `queries`, `writes` `[B, T, HV, K]`, `scores` `[B, N, HV, C, C]`, `kept`
        `[B, N, HV, K]` float32; with the delta rule also `keys`, `overlaps` and `beta`.
    """
    plan = Plan(shape=shape, scale=float(scale), interpret=interpret is not None)
    inputs = {"do": do, "u": u, "state": states} | cotangents
    if shape.delta:
        inputs |= {"dv": dv, "beta_of": beta}
        inputs |= {f"{name}_of": made[name] for name in ("writes", "scores", "overlaps")}
    names = (*inputs, *plan.outputs)
    kernel = plgpu.kernel(
        launches.named("chunk_cotangents", functools.partial(_body, plan, names)),
        out_type=tuple(plan.outputs.values()),
        scratch_types=_scratch(plan),
        grid=(shape.batch * shape.chunks * shape.heads,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return dict(zip(plan.outputs, kernel(*inputs.values()), strict=True))
