"""Outputs and states, chunk after chunk; heads and columns of V in parallel.

Rows of one chunk, `S` its incoming state in float32 registers, `T` its inverse::

    u = T (v - exp(b) k S)                 without the delta rule: u = v, and beta is 1
    o = scale * (exp(b) q S + tril(D * (q k^T)) (beta u))
    S = exp(b_C) S + k^T (exp(b_C - b) beta u)

Columns of V never meet, so a warpgroup owns 64 of them and shares `q`, `k` and `T` with the
other warpgroups of its program; the last one only issues loads, `STAGES` chunks deep.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import tiles

__all__ = ["run_states"]

CHUNK = tiles.CHUNK
WIDTH = 64  # columns of V of one warpgroup
STAGES = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch."""

    batch: int
    chunks: int
    heads: int  # value heads
    group: int  # value heads per key head
    key_dim: int
    value_dim: int
    dtype: jnp.dtype
    scale: float
    delta: bool
    gated: bool
    save: bool
    columns: int  # warpgroups that compute, each on WIDTH columns of V
    interpret: bool

    @property
    def slices(self) -> int:
        return self.value_dim // (self.columns * WIDTH)

    @property
    def blocks(self) -> int:
        """Blocks of rows of the state."""
        return self.key_dim // CHUNK

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("beta",) * self.delta + ("b", "b_column", "total") * self.gated

    def place(self):
        """Batch, head and the first block of V of this program."""
        item = lax.axis_index("program")
        part, item = lax.rem(item, self.slices), lax.div(item, self.slices)
        return lax.div(item, self.heads), lax.rem(item, self.heads), part * self.columns


def _scratch(plan: Plan):
    tile = functools.partial(tiles.tile, dtype=plan.dtype)
    own, pair = (plan.columns, CHUNK, WIDTH), (plan.columns, CHUNK, CHUNK)
    keys = (STAGES, CHUNK, plan.key_dim)
    buffers = dict(
        q=tile(*keys), k=tile(*keys), v=tile(STAGES, *own),
        state=tile(plan.columns, plan.key_dim, WIDTH), scores=tile(*pair), write=tile(*own),
    )  # fmt: skip
    if plan.delta:
        buffers |= dict(inverse=tile(STAGES, CHUNK, CHUNK), error=tile(*own))
    if plan.gated and plan.key_dim <= 128:
        buffers |= dict(decayed=tile(*own))
    buffers |= {name: plgpu.SMEM((STAGES, CHUNK), jnp.float32) for name in plan.vectors}
    copies = 2 + plan.columns + plan.delta + len(plan.vectors)
    loaded = plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES)
    freed = plgpu.Barrier(num_arrivals=plan.columns, num_barriers=STAGES)
    return buffers, loaded, freed


def _load(plan: Plan, refs, buffers, loaded, freed, batch, head, first):
    """Issues the loads of every chunk."""

    def step(chunk, _):
        stage = lax.rem(chunk, STAGES)
        pl.when(chunk >= STAGES)(lambda: plgpu.barrier_wait(freed.at[stage]))
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        barrier = loaded.at[stage]
        keys = (batch, tokens, lax.div(head, plan.group))
        plgpu.copy_gmem_to_smem(refs["k"].at[keys], buffers["k"].at[stage], barrier)
        for i in range(plan.columns):
            values = (batch, tokens, head, pl.ds((first + i) * WIDTH, WIDTH))
            plgpu.copy_gmem_to_smem(refs["v"].at[values], buffers["v"].at[stage, i], barrier)
        if plan.delta:
            inverse = refs["inverse"].at[batch, chunk, head]
            plgpu.copy_gmem_to_smem(inverse, buffers["inverse"].at[stage], barrier)
        for name in plan.vectors:
            vector = refs[name].at[batch, chunk, head]
            plgpu.copy_gmem_to_smem(vector, buffers[name].at[stage], barrier)
        plgpu.copy_gmem_to_smem(refs["q"].at[keys], buffers["q"].at[stage], barrier)

    lax.fori_loop(0, plan.chunks, step, None)
    for chunk in range(max(plan.chunks, STAGES), plan.chunks + STAGES):
        plgpu.barrier_wait(freed.at[chunk % STAGES])


def _matrix(ref) -> jax.Array:
    return plgpu.load(ref, layout=tiles.MATRIX).astype(jnp.float32)


def _correct(plan: Plan, tile, decay):
    """`u`, `beta u` in registers."""
    u = _matrix(tile["v"])
    if not plan.delta:
        return u, u
    shape = u.shape
    read = tiles.product(shape, (tile["k"], tile["state"]))
    if plan.gated:
        read *= tiles.over_rows(decay, shape)
    tile["error"][...] = (u - read).astype(plan.dtype)
    plgpu.commit_smem()
    u = tiles.product(shape, (tile["inverse"], tile["error"]))
    return u, u * tiles.over_rows(tiles.row(tile["beta"]), shape)


def _scores(plan: Plan, tile):
    scores = tiles.product((CHUNK, CHUNK), (tile["q"], tiles.transposed(tile["k"])))
    mask = tiles.chunk_mask()
    if plan.gated:
        scores *= tiles.decay_matrix(tiles.row(tile["b"]), tiles.column(tile["b_column"]), mask)
    return jnp.where(mask, scores, 0.0)


def _compute(plan: Plan, refs, buffers, loaded, freed, batch, head, part, role):
    """The chunks of one warpgroup's columns; returns the final state by blocks of rows."""
    shape = (CHUNK, WIDTH)
    columns = pl.ds(part * WIDTH, WIDTH)
    rows = [pl.ds(i * CHUNK, CHUNK) for i in range(plan.blocks)]
    own = {x: buffers[x].at[role] for x in ("state", "error", "scores", "write", "decayed") if x in buffers}

    def step(chunk, state):
        stage = lax.rem(chunk, STAGES)
        tile = own | {x: buffers[x].at[stage] for x in ("q", "k", "inverse", *plan.vectors) if x in buffers}
        tile["v"] = buffers["v"].at[stage, role]
        tokens = (batch, pl.ds(chunk * CHUNK, CHUNK), head, columns)
        # The stores of the chunk before read the tiles that this one fills.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for at, block in zip(rows, state, strict=True):
            tile["state"].at[at][...] = block.astype(plan.dtype)
        plgpu.commit_smem()
        if plan.save:
            plgpu.copy_smem_to_gmem(tile["state"], refs["states"].at[batch, chunk, head, :, columns])
        plgpu.barrier_wait(loaded.at[stage])
        b = decay = None
        if plan.gated:
            b = tiles.row(tile["b"])
            decay = jnp.exp(b)
        u, write = _correct(plan, tile, decay)
        tile["scores"][...] = _scores(plan, tile).astype(plan.dtype)
        tile["write"][...] = write.astype(plan.dtype)
        if plan.gated:
            total = tiles.row(tile["total"])
            decayed = (write * tiles.over_rows(jnp.exp(total - b), shape)).astype(plan.dtype)
            if "decayed" in tile:
                tile["decayed"][...] = decayed
        if plan.save and plan.delta:
            tile["error"][...] = u.astype(plan.dtype)
        plgpu.commit_smem()
        if plan.save and plan.delta:
            plgpu.copy_smem_to_gmem(tile["error"], refs["u"].at[tokens])
        o = tiles.product(shape, (tile["q"], tile["state"]))
        if plan.gated:
            o *= tiles.over_rows(decay, shape)
            kept = tiles.over_rows(jnp.exp(total), shape)
            state = [block * kept for block in state]
        o = tiles.product(shape, (tile["scores"], tile["write"]), init=o, interpret=plan.interpret)
        added = tile.get("decayed", tile["write"])
        if plan.gated and "decayed" not in tile:
            # Shared memory is full at K = 256: the second use of one tile.
            tile["write"][...] = decayed
            plgpu.commit_smem()
        state = [
            tiles.product(
                shape, (tiles.transposed(tile["k"].at[:, at]), added), init=block, interpret=plan.interpret
            )
            for at, block in zip(rows, state, strict=True)
        ]
        plgpu.barrier_arrive(freed.at[stage])
        tile["scores"][...] = (o * plan.scale).astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile["scores"], refs["o"].at[tokens])
        return state

    places = [(batch, head, at, columns) for at in rows]
    state = [
        plgpu.load(refs["start"].at[at], layout=tiles.MATRIX, optimized=False) for at in places
    ]
    state = lax.fori_loop(0, plan.chunks, step, state)
    for at, block in zip(places, state, strict=True):
        refs["final"].at[at][...] = block
    plgpu.wait_smem_to_gmem(0)


def _body(plan: Plan, names, *args):
    *refs, buffers, loaded, freed = args
    refs = dict(zip(names, refs, strict=True))
    role = lax.axis_index("role")
    batch, head, first = plan.place()

    @pl.when(role < plan.columns)
    def _():
        plgpu.set_max_registers(232, action="increase")
        _compute(plan, refs, buffers, loaded, freed, batch, head, first + role, role)

    @pl.when(role == plan.columns)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _load(plan, refs, buffers, loaded, freed, batch, head, first)


def run_states(q, k, v, inverse, state, *, beta, b, scale, save, interpret=None):
    """Outputs, the final state and what the backward needs.

    Args:
        q, k: `[B, T, H, K]` with T a multiple of 64.
        v: `[B, T, HV, V]`.
        inverse: `[B, N, HV, C, C]`, or `None` without the delta rule.
        state: The initial state, `[B, HV, K, V]` float32.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        b: In-chunk cumulative log-decay, `[B, N, HV, C]` float32, or `None` without a gate.
        scale: Factor on `q`.
        save: Whether to return `states` and `u`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        A dictionary: `o` `[B, T, HV, V]`, `final` `[B, HV, K, V]` float32 and, if saved, the
        `states` entering each chunk `[B, N, HV, K, V]` and (delta rule) `u` `[B, T, HV, V]`.
    """
    batch, tokens, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    columns = 1 if key_dim > 128 else min(2, value_dim // WIDTH)
    plan = Plan(
        batch, tokens // CHUNK, heads, heads // key_heads, key_dim, value_dim, q.dtype,
        float(scale), inverse is not None, b is not None, save, columns, interpret is not None,
    )  # fmt: skip
    inputs = dict(q=q, k=k, v=v, start=state)
    if plan.delta:
        inputs |= dict(inverse=inverse, beta=beta)
    if plan.gated:
        inputs |= dict(b=b, b_column=b, total=jnp.broadcast_to(b[..., -1:], b.shape))
    shape = jax.ShapeDtypeStruct
    outputs = dict(o=shape(v.shape, v.dtype), final=shape(state.shape, jnp.float32))
    if save:
        outputs["states"] = shape((batch, plan.chunks, heads, key_dim, value_dim), v.dtype)
        if plan.delta:
            outputs["u"] = shape(v.shape, v.dtype)
    kernel = plgpu.kernel(
        functools.partial(_body, plan, (*inputs, *outputs)),
        out_type=tuple(outputs.values()),
        scratch_types=_scratch(plan),
        grid=(batch * heads * plan.slices,),
        grid_names=("program",),
        num_threads=columns + 1,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=False),
        interpret=interpret,
    )
    return dict(zip(outputs, kernel(*inputs.values()), strict=True))
