"""Gradients of every chunk in parallel, once the states and their gradients are known.

Rows of one chunk, `S` its incoming state, `G = dL/dS'` of its outgoing state over `scale`,
`u = (I + L)^-1 (v - exp(b) k S)` its corrected values (`v` without the delta rule), `D_ij =
exp(b_i - b_j)`; `dv` comes from `reverse_states`::

    Y = tril(D * (do u^T))                       X = stril(D * (dv u^T))
    dq = scale * (exp(b) do S^T + (Y beta_j) k)
    W  = scale * (exp(b_C - b) u G^T + Y^T q) - X^T k      what `k` writes, before beta
    R  = exp(b) dv S^T + (X beta_j) k                      what it reads
    dk = beta W - R
    dbeta = rowsum(k * W) = diag(dv u^T) / beta
    db = rowsum(q * dq) - rowsum(k * (beta W)) - rowsum(k * R)
    db_C += scale * (exp(b_C) <S, G> + sum(z))             z = exp(b_C - b) beta rowsum(k * (u G^T))

In the sum of `db` that is the gradient of `g`, a pair of tokens counts in the row of the later
one and against it in the row of the earlier one. Both are taken from the same 16-bit tiles, so
that where gates are strong nothing is left but what the state carries. In bfloat16 these are `Y
beta_j`, `X beta_j` and `k`, and `beta W` is summed in the place of `W`; a beta nearer to 0 than
`SMALLEST_BETA` is replaced by it, so that `W` is known. With a gate the tiles of pairs are two
each, a split (high, low) pair: where keys are similar, the roundings of `X` alone would be
most of the error of that sum. In float16, which has no room for small weights, the tiles are `Y`,
`X` and `beta k`.

A persistent thread block per SM walks over (batch, run of chunks, head, block of K). The
first state of a run is loaded, the next one made in its place: `S' = exp(b_C) S + (beta exp(b_C -
b) k)^T u`. One warpgroup computes `Y`, `X`, `dq` and these states, one `dk`; the third only issues
loads, each tile's next load as soon as both have used it, because the kernel is bound by memory
(12.6 MFLOP for 176 KiB at K = V = 128, 2.1 for the 32 KiB of a state).
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax import compat
from deltanet_jax.kernels.mosaic_gpu import gate_vectors, pairs, state_planes
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, launches, mma, smem
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import Index, Ref
from deltanet_jax.kernels.mosaic_gpu.blocks.pipeline import Role, Share, run_roles
from deltanet_jax.kernels.mosaic_gpu.chunk_gradients_plan import (
    Barriers,
    Inputs,
    Place,
    Plan,
    Results,
    Scratch,
    scratch_of,
)
from deltanet_jax.kernels.mosaic_gpu.gate_vectors import GateParts
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["ChunkGradients", "chunk_gradients"]

# Below this, diag(dv u^T) / beta would divide rounding errors of fp16 subnormals.
SMALL_BETA = 1 / 128
SMALLEST_BETA = 2.0**-64
# The share of `diag(dv u^T) / beta` in the gradient of beta, beside that of `rowsum(k * W)`. Their
# rounding errors are nearly independent: on layer-like inputs those of the other are smaller by a
# quarter, where keys are similar 2.5 times as large (`docs/accuracy.md`).
DIAGONAL = 0.85


class ChunkGradients(NamedTuple):
    """Gradients of all chunks."""

    dq: jax.Array  # [B, T, HV, K], as `dk`; one for each value head
    dk: jax.Array
    dbeta: jax.Array | None  # [B, N, HV, C] float32
    dg: jax.Array | None  # [B, T, HV] float32


def _unless(condition: bool | jax.Array) -> Callable[..., Any]:
    return pl.when(not condition if isinstance(condition, bool) else jnp.logical_not(condition))


def _load(
    plan: Plan,
    refs: Inputs,
    planes: tuple[Ref, ...],
    tiles: Scratch,
    barriers: Barriers,
    place: Place,
) -> None:
    """Issue the loads of one chunk."""
    batch, chunk, head, block = place.locate(plan)
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    keys = pl.ds(block * plan.key_block, plan.key_block)

    def wait(freed: Ref, *, first: bool) -> None:
        ready = functools.partial(plgpu.barrier_wait, freed)
        pl.when(place.step > 0)(ready) if first else ready()

    for part in range(plan.value_blocks):
        values = (batch, tokens, head, pl.ds(part * plan.value_block, plan.value_block))

        def load_corrected(part: int = part, values: tuple[Any, ...] = values) -> None:
            wait(barriers.freed_state, first=part == 0)
            plgpu.copy_gmem_to_smem(refs.u.at[values], tiles.u, barriers.values)

        wait(barriers.freed_values, first=part == 0)
        plgpu.copy_gmem_to_smem(refs.do.at[values], tiles.do, barriers.values)
        pl.when(place.stored)(load_corrected)
        if plan.shape.delta:
            plgpu.copy_gmem_to_smem(refs.dv.at[values], tiles.dv, barriers.dv)
        if part == 0:
            _load_vectors(refs, tiles, barriers, place, (batch, chunk, head))
        state = (batch, lax.div(chunk, plan.stride), head, keys, values[-1])

        def load_state(state: tuple[Any, ...] = state) -> None:
            plgpu.copy_gmem_to_smem(refs.state.at[state], tiles.state, barriers.state)

        pl.when(place.stored)(load_state)
        sources = planes[part * plan.planes : (part + 1) * plan.planes]
        own = (batch, tokens, head, keys)
        state_planes.load_planes(sources, own, tiles.dstate, barriers.dstate)
        # Its state is made while the tile of the chunk before is still read.
        _unless(place.stored)(load_corrected)
    wait(barriers.freed_keys, first=True)
    shared = (batch, tokens, lax.div(head, plan.shape.group), keys)
    plgpu.copy_gmem_to_smem(refs.q.at[shared], tiles.q, barriers.keys)
    plgpu.copy_gmem_to_smem(refs.k.at[shared], tiles.k, barriers.keys)


def _load_vectors(
    refs: Inputs, tiles: Scratch, barriers: Barriers, place: Place, own: tuple[Index, Index, Index]
) -> None:
    vectors = (
        (refs.beta, tiles.beta, barriers.beta),
        (refs.beta_column, tiles.beta_column, barriers.beta),
        (refs.b, tiles.b, barriers.b),
        (refs.b_column, tiles.b_column, barriers.b),
    )
    for source, tile, loaded in vectors:
        if source is not None:
            target = tile.at[lax.rem(place.step, 2)]
            plgpu.copy_gmem_to_smem(source.at[own], target, loaded)


def _store(plan: Plan, place: Place, keys: tuple[Ref, Ref], *vectors: tuple[Ref, Ref]) -> None:
    """Send a finished tile of keys, and vectors, to memory."""
    batch, chunk, head, block = place.locate(plan)
    channels = pl.ds(block * plan.key_block, plan.key_block)
    plgpu.commit_smem()
    own = (batch, pl.ds(chunk * CHUNK, CHUNK), head, channels)
    tile, target = keys
    plgpu.copy_smem_to_gmem(tile, target.at[own])
    for tile, target in vectors:
        plgpu.copy_smem_to_gmem(tile, target.at[block, batch, chunk, head])


def _dot_rows(ref: Ref, x: jax.Array) -> jax.Array:
    return (smem.matrix(ref) * x).sum(axis=1)


def _overlap(plan: Plan, tiles: Scratch) -> list[tuple[Ref, Ref]]:
    """The products whose sum has `<S, G>` of this block as its trace."""
    rows = [pl.ds(i, CHUNK) for i in range(0, plan.key_block, CHUNK)]
    return [(tiles.state.at[at], tiles.dstate.at[:, at]) for at in rows]


def _next_state(plan: Plan, tiles: Scratch, barriers: Barriers) -> None:
    """`exp(b_C) S + (beta exp(b_C - b) k)^T u` in the place of `S`."""
    for i in range(0, plan.key_block, CHUNK):
        rows = pl.ds(i, CHUNK)
        state = smem.matrix(tiles.state.at[rows])
        keys = smem.load_transposed(tiles.k.at[:, rows], interpret=plan.interpret)
        if plan.shape.scalar_gate:
            total = tiles.b[CHUNK - 1]
            state *= jnp.exp(total)
            rest = jnp.exp(total - smem.column(tiles.b_column))
            keys *= smem.over_columns(rest, keys.shape)
        if plan.shape.delta:
            keys *= smem.over_columns(smem.column(tiles.beta_column), keys.shape)
        pair = keys.astype(plan.shape.dtype), tiles.u
        state = mma.product(state.shape, pair, init=state, interpret=plan.interpret)
        if i == 0 and plan.shape.delta:
            plgpu.barrier_wait(barriers.read)
        tiles.state.at[rows][...] = state.astype(plan.shape.dtype)
    plgpu.commit_smem()
    if plan.shape.delta:
        plgpu.barrier_arrive(barriers.made)


def _divisor(beta: jax.Array) -> jax.Array:
    """`beta`, but never 0."""
    return jnp.where(jnp.abs(beta) < SMALLEST_BETA, SMALLEST_BETA, beta)


def _weights(plan: Plan, tiles: Scratch) -> jax.Array | float:
    """Return the factor of products of pairs; anything above the diagonal."""
    weights = pairs.pair_decay(tiles.b, tiles.b_column) if plan.shape.scalar_gate else 1.0
    if plan.weighs_pairs:
        beta = _divisor(smem.column(tiles.beta_column))
        weights *= smem.over_columns(beta, (CHUNK, CHUNK))
    return weights


def _store_pairs(plan: Plan, tiles: tuple[Ref, ...], x: jax.Array) -> None:
    """Store `Y` or `X`, as one tile or as two whose sum it is."""
    if plan.halves:
        parts: tuple[jax.Array, ...] = lanes.halves(x, interpret=plan.interpret)
    else:
        parts = (x.astype(plan.shape.dtype),)
    for tile, part in zip(tiles, parts, strict=True):
        tile[...] = part


def _wait_vectors(barriers: Barriers) -> None:
    for loaded in (barriers.beta, barriers.b):
        if loaded is not None:
            plgpu.barrier_wait(loaded)


def _query_products(
    plan: Plan, tiles: Scratch, barriers: Barriers, place: Place
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`do u^T`, `do S^T` and, with a gate, a product with the trace `<S, G>`."""
    shape, pair = (CHUNK, plan.key_block), (CHUNK, CHUNK)
    product = functools.partial(mma.product, interpret=plan.interpret)
    y = dq = overlap = None  # sums over the blocks of V
    for part in range(plan.value_blocks):
        plgpu.barrier_wait(barriers.values)
        y = product(pair, (tiles.do, smem.transposed(tiles.u)), init=y)
        pl.when(place.stored)(lambda: plgpu.barrier_wait(barriers.state))
        dq = product(shape, (tiles.do, smem.transposed(tiles.state)), init=dq)
        # Without a gate too: `dq` takes the place of what is loaded.
        plgpu.barrier_wait(barriers.dstate)
        if plan.shape.scalar_gate:
            overlap = product(pair, *_overlap(plan, tiles), init=overlap)
        if part == 0:
            _wait_vectors(barriers)
        plgpu.barrier_arrive(barriers.freed_values)
        pl.when(place.last)(lambda: plgpu.barrier_arrive(barriers.freed_state))
    assert y is not None
    assert dq is not None
    return y, dq, overlap


def _query_step(plan: Plan, out: Results, tiles: Scratch, barriers: Barriers, place: Place) -> None:
    """`dq` of one chunk, `Y` for the other warpgroup, and the state of the next chunk."""
    shape = (CHUNK, plan.key_block)
    y, dq, overlap = _query_products(plan, tiles, barriers, place)
    if overlap is not None:
        overlap = lanes.diagonal(overlap, interpret=plan.interpret)
    y = lanes.masked(y * _weights(plan, tiles), interpret=plan.interpret)
    pl.when(place.step > 0)(lambda: plgpu.barrier_wait(barriers.free))
    _store_pairs(plan, tiles.y, y)
    if plan.weighs_keys:
        plgpu.barrier_wait(barriers.keys)
        beta = smem.over_rows(smem.row(tiles.beta), shape)
        tiles.beta_k[...] = (smem.matrix(tiles.k) * beta).astype(plan.shape.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.ready)
    if plan.shape.scalar_gate:
        dq *= smem.over_rows(jnp.exp(smem.row(tiles.b)), shape)
    if not plan.weighs_keys:
        plgpu.barrier_wait(barriers.keys)

    @_unless(place.last)
    def _() -> None:
        _next_state(plan, tiles, barriers)
        plgpu.barrier_arrive(barriers.freed_state)

    pairs = [(y, tiles.weighed) for y in tiles.y]
    dq = plan.scale * mma.product(shape, *pairs, init=dq, interpret=plan.interpret)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tiles.dq[...] = dq.astype(plan.shape.dtype)
    if plan.shape.scalar_gate:
        tiles.overlap[...] = overlap
        tiles.db_q[...] = _dot_rows(tiles.q, dq)
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.freed_keys)
    vectors = []
    if out.parts is not None:
        vectors = [(tiles.db_q, out.parts.db_q), (tiles.overlap, out.parts.overlap)]
    _store(plan, place, (tiles.dq, out.dq), *vectors)


def _pair_step(plan: Plan, tiles: Scratch, x: jax.Array) -> None:
    """Store `diag(dv u^T)` and `-X / scale`."""
    tiles.diagonal[...] = lanes.diagonal(x, interpret=plan.interpret)
    x = lanes.masked(x * _weights(plan, tiles), operator.gt, interpret=plan.interpret)
    # Over scale, so that it adds to the products that the scale multiplies.
    _store_pairs(plan, tiles.x, x * (-1 / plan.scale))
    plgpu.commit_smem()


def _key_products(
    plan: Plan, tiles: Scratch, barriers: Barriers, place: Place
) -> tuple[jax.Array, jax.Array | None]:
    """`u G^T` and, with the delta rule, `dv S^T`."""
    shape, pair = (CHUNK, plan.key_block), (CHUNK, CHUNK)
    product = functools.partial(mma.product, interpret=plan.interpret)
    w = x = r = None  # sums over the blocks of V
    _wait_vectors(barriers)
    for part in range(plan.value_blocks):
        plgpu.barrier_wait(barriers.values)
        if plan.shape.delta:
            plgpu.barrier_wait(barriers.dv)
            x = product(pair, (tiles.dv, smem.transposed(tiles.u)), init=x)
            if part == plan.value_blocks - 1:
                _pair_step(plan, tiles, x)
            pl.when(place.stored)(lambda: plgpu.barrier_wait(barriers.state))
            made = functools.partial(plgpu.barrier_wait, barriers.made)
            _unless(place.stored)(made)
            r = product(shape, (tiles.dv, smem.transposed(tiles.state)), init=r)
            read = functools.partial(plgpu.barrier_arrive, barriers.read)
            _unless(place.last)(read)
        plgpu.barrier_wait(barriers.dstate)
        w = product(shape, (tiles.u, tiles.dstate), init=w)
        plgpu.barrier_arrive(barriers.freed_values)
        plgpu.barrier_arrive(barriers.freed_state)
    assert w is not None
    return w, r


def _of_tokens(
    plan: Plan, tiles: Scratch, w: jax.Array, r: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """`u G^T` and `dv S^T` times what their rows have in `W` and in `R`."""
    weights = [_divisor(smem.row(tiles.beta))] if plan.weighs_pairs else []
    if plan.shape.scalar_gate:
        weights += [jnp.exp(tiles.b[CHUNK - 1] - smem.row(tiles.b))]
    if weights:
        w *= smem.over_rows(functools.reduce(operator.mul, weights), w.shape)
    if r is not None:
        read: float | jax.Array = -1 / plan.scale
        if plan.shape.scalar_gate:
            read = smem.over_rows(read * jnp.exp(smem.row(tiles.b)), r.shape)
        r *= read
    return w, r


def _key_step(plan: Plan, out: Results, tiles: Scratch, barriers: Barriers, place: Place) -> None:
    """`dk` and the gradients of the gates of one chunk."""
    shape = (CHUNK, plan.key_block)
    product = functools.partial(mma.product, interpret=plan.interpret)
    # `W / scale` or, where pairs are weighed, `beta W / scale`; `-R / scale`.
    w, r = _key_products(plan, tiles, barriers, place)
    w, r = _of_tokens(plan, tiles, w, r)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_wait(barriers.keys)
    # What the other warpgroup waits for is done as soon as can be after what this one waits for.
    ready = functools.partial(plgpu.barrier_wait, barriers.ready)
    free = functools.partial(plgpu.barrier_arrive, barriers.free)
    if plan.weighs_keys:
        ready()
    keys = tiles.weighed
    if plan.shape.scalar_gate:
        # At once, and `beta` is loaded again below, as registers are short here.
        tiles.db_write[...] = _dot_rows(keys, w)
    pairs = [(smem.transposed(y), tiles.q) for y in tiles.y]
    if r is not None:
        pairs += [(smem.transposed(x), tiles.k) for x in tiles.x]
        r = product(shape, *((x, keys) for x in tiles.x), init=r)
    if not plan.weighs_keys:
        ready()
    w = product(shape, *pairs, init=w)
    if not plan.weighs_keys:
        free()
    if plan.shape.scalar_gate or plan.weighs_pairs:
        write = _dot_rows(keys, w)
    if plan.shape.scalar_gate:
        db = -write
    vectors = []
    if r is not None:
        beta = smem.row(tiles.beta)
        divisor = _divisor(beta)
        dbeta = write / divisor if plan.weighs_pairs else _dot_rows(tiles.k, w)
        if plan.shape.scalar_gate:
            db += _dot_rows(tiles.k, r)
    if plan.weighs_keys:
        plgpu.commit_smem()
        free()
    if r is not None:
        own = beta / divisor if plan.weighs_pairs else beta
        w = w * smem.over_rows(own, shape) + r
        dbeta *= plan.scale
        other = smem.row(tiles.diagonal) / (jnp.maximum(beta, SMALL_BETA) * plan.key_blocks)
        both = DIAGONAL * other + (1 - DIAGONAL) * dbeta
        tiles.dbeta[...] = jnp.where(beta > SMALL_BETA, both, dbeta)
        vectors += [(tiles.dbeta, out.dbeta)]
    tiles.dk[...] = (plan.scale * w).astype(plan.shape.dtype)
    if out.parts is not None:
        tiles.db_k[...] = plan.scale * db
        vectors += [(tiles.db_k, out.parts.db_k), (tiles.db_write, out.parts.db_write)]
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.freed_keys)
    _store(plan, place, (tiles.dk, out.dk), *vectors)


def _body(
    plan: Plan,
    refs: Inputs,
    planes: tuple[Ref, ...],
    out: Results,
    every: Scratch,
    barriers: dict[int, Ref],
) -> None:
    own_barriers = plan.arrivals.among(barriers)
    out = out._replace(**_in_place(planes))

    def walk(work: Callable[[Scratch, Barriers, Place], None], *, loads: bool = False) -> None:
        share = Share(plan.items, plan.programs)

        def run(i: Index, step: Index) -> Index:
            item = share.item(i)
            length = plan.length(item)

            def chunk(turn: Index, step: Index) -> Index:
                tiles = _own_tiles(plan, every, None if loads else step)
                ends = (turn == 0, turn + 1 == length) if plan.stride > 1 else (True, True)
                work(tiles, own_barriers, Place(item, turn, step, *ends))
                return step + 1

            after: Index = lax.fori_loop(0, length, chunk, step)
            return after

        lax.fori_loop(0, share.rounds, run, jnp.int32(0))

    def queries() -> None:
        walk(functools.partial(_query_step, plan, out))
        plgpu.barrier_wait(own_barriers.free)
        plgpu.wait_smem_to_gmem(0)

    def keys() -> None:
        walk(functools.partial(_key_step, plan, out))
        plgpu.wait_smem_to_gmem(0)

    def produce() -> None:
        walk(functools.partial(_load, plan, refs, planes), loads=True)
        own = own_barriers
        for freed in (own.freed_values, own.freed_state, own.freed_keys):
            plgpu.barrier_wait(freed)

    bodies = zip(plan.config.registers, (queries, keys, produce), strict=True)
    run_roles(*(Role(1, registers, body) for registers, body in bodies))


def _own_tiles(plan: Plan, every: Scratch, step: Index | None) -> Scratch:
    """The tiles of a chunk, with one place of its vectors, or both if `step` is `None`."""
    first = (lanes.zero(interpret=plan.interpret),) * len(plan.places)
    vectors = (every.beta, every.beta_column, every.b, every.b_column)
    tiles = every._replace(beta=None, beta_column=None, b=None, b_column=None)
    tiles = launches.at(tiles, lambda: first)
    place = slice(None) if step is None else lax.rem(step, 2)
    beta, beta_column, b, b_column = launches.at(vectors, lambda: place)
    return tiles._replace(beta=beta, beta_column=beta_column, b=b, b_column=b_column)


def _in_place(planes: tuple[Ref, ...]) -> dict[str, Ref]:
    """The gradients that take the place of a plane, which only their own item reads."""
    return dict(zip(("dq", "dk"), planes, strict=False))


def _launch(
    plan: Plan, inputs: Inputs, planes: tuple[jax.Array, ...], interpret: object
) -> Results:
    shape, array = plan.shape, functools.partial(compat.type_like, inputs.q)
    keys = array((shape.batch, shape.tokens, shape.heads, shape.key_dim), shape.dtype)
    vector = array((plan.key_blocks, shape.batch, shape.chunks, shape.heads, CHUNK), jnp.float32)
    outputs = Results(
        dq=None,
        dk=None if len(planes) > 1 else keys,
        dbeta=vector if shape.delta else None,
        parts=GateParts(vector, vector, vector, vector) if shape.scalar_gate else None,
    )
    kernel = launches.overwriting(
        "chunk_gradients",
        functools.partial(_body, plan),
        outputs,
        scratch_of(plan),
        plan.arrivals.types(),
        programs=plan.programs,
        warpgroups=3,
        automatic_barriers=True,
        interpret=interpret,
    )
    held, out = launches.run_over(kernel, inputs, planes, outputs)
    return out._replace(**_in_place(held))


def chunk_gradients(
    shape: Shape,
    q: jax.Array,
    k: jax.Array,
    u: jax.Array,
    do: jax.Array,
    dv: jax.Array,
    states: jax.Array,
    planes: tuple[jax.Array, ...],
    *,
    beta: jax.Array | None,
    b: jax.Array | None,
    scale: float,
    interpret: object = None,
) -> ChunkGradients:
    """`dq`, `dk`, `dbeta` and `dg` of all chunks.

    Args:
        shape: Sizes and variant of the call.
        q: `[B, T, H, K]` with T a multiple of 64.
        k: The same shape.
        u: Corrected values (the values themselves without the delta rule), `[B, T, HV, V]`.
        do: Gradient of the outputs, `[B, T, HV, V]`.
        dv: Gradient of the values, `[B, T, HV, V]`; unused without the delta rule.
        states: State entering every `state_planes.stride`-th chunk, `[B, N', HV, K, V]`.
        planes: Gradient of the state leaving each chunk, over `scale`: the planes of
            `state_planes`, each `[B, T, HV, K]`. `dq` and `dk` take the place of the first two;
            at V = 64, with one plane, only `dq` does.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        b: In-chunk cumulative log-decay, `[B, N, HV, C]` float32, or `None` without a gate.
        scale: Factor on `q`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        The gradients.
    """
    plan = Plan(shape=shape, scale=float(scale), interpret=interpret is not None)
    inputs = Inputs(q, k, u, do, states, dv if shape.delta else None, beta, beta, b, b)
    out = _launch(plan, inputs, planes, interpret)
    dbeta = out.dbeta.sum(0) if shape.delta else None
    dg = None
    if out.parts is not None and b is not None:
        dg = gate_vectors.gate_gradient(out.parts, b, scale=plan.scale, interpret=interpret)
    return ChunkGradients(out.dq, out.dk, dbeta, dg)
