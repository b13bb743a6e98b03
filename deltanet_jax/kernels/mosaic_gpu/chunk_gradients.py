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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax import compat
from deltanet_jax.kernels.mosaic_gpu import gate_vectors, pairs, state_planes
from deltanet_jax.kernels.mosaic_gpu.blocks import CHUNK, lanes, launches, mma, smem
from deltanet_jax.kernels.mosaic_gpu.chunk_gradients_plan import Place, Plan
from deltanet_jax.kernels.mosaic_gpu.shape import Shape

__all__ = ["chunk_gradients"]

# Below this, diag(dv u^T) / beta would divide rounding errors of fp16 subnormals.
SMALL_BETA = 1 / 128
SMALLEST_BETA = 2.0**-64
# The share of `diag(dv u^T) / beta` in the gradient of beta, beside that of `rowsum(k * W)`. Their
# rounding errors are nearly independent: on layer-like inputs those of the other are smaller by a
# quarter, where keys are similar 2.5 times as large (`docs/accuracy.md`).
DIAGONAL = 0.85
GATE_PARTS = ("db_q", "db_k", "overlap", "db_write")  # what `gate_gradient` adds up


def _unless(condition):
    return pl.when(not condition if isinstance(condition, bool) else jnp.logical_not(condition))


def _scratch(plan: Plan):
    tile = functools.partial(smem.tile, *plan.places, dtype=plan.shape.dtype)
    keys, values = (CHUNK, plan.key_block), (CHUNK, plan.value_block)
    state = (plan.key_block, plan.value_block)
    pair = (CHUNK, CHUNK)
    vector, two = (plgpu.SMEM((*n, CHUNK), jnp.float32) for n in (plan.places, (2,)))
    buffers = {
        "do": tile(*values), "u": tile(*values),
        "state": tile(*state), "dstate": tile(*state[::-1]),
        "q": tile(*keys), "k": tile(*keys), "dq": tile(*keys), "dk": tile(*keys), "y": tile(*pair),
    }  # fmt: skip
    if plan.shape.delta:
        buffers |= {"dv": tile(*values), "x": tile(*pair)}
        buffers |= {"dbeta": vector, "diagonal": vector}
        buffers |= {plan.keys: tile(*keys)}
    if plan.halves:
        buffers |= {"x_low": tile(*pair), "y_low": tile(*pair)}
    if plan.shape.scalar_gate:
        buffers |= dict.fromkeys(GATE_PARTS, vector)
    # Two of each: `beta` of one item is still read when the next item's values arrive.
    buffers |= dict.fromkeys(plan.vectors, two)
    # Few barriers of many stages: the phases that a warpgroup counts are bits of one register.
    barriers = {
        arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=len(names))
        for arrivals, names in plan.barriers.items()
    }
    return buffers, barriers


def _load(plan: Plan, refs, buffers, barriers, place: Place):
    """Issue the loads of one chunk."""
    batch, chunk, head, block = place.locate(plan)
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    keys = pl.ds(block * plan.key_block, plan.key_block)

    def wait(name, *, first):
        ready = functools.partial(plgpu.barrier_wait, barriers[f"freed_{name}"])
        pl.when(place.step > 0)(ready) if first else ready()

    def load(name, *index):
        barrier = barriers["values" if name in ("do", "u") else name]
        plgpu.copy_gmem_to_smem(refs[name].at[index], buffers[name], barrier)

    for part in range(plan.value_blocks):
        values = pl.ds(part * plan.value_block, plan.value_block)

        def load_corrected(part=part, values=values):
            wait("state", first=part == 0)
            load("u", batch, tokens, head, values)

        wait("values", first=part == 0)
        load("do", batch, tokens, head, values)
        pl.when(place.stored)(load_corrected)
        if plan.shape.delta:
            load("dv", batch, tokens, head, values)
        for name in plan.vectors if part == 0 else ():
            target = buffers[name].at[lax.rem(place.step, 2)]
            vector = refs[name].at[batch, chunk, head]
            plgpu.copy_gmem_to_smem(vector, target, barriers[name.removesuffix("_column")])
        run = lax.div(chunk, plan.stride)
        pl.when(place.stored)(functools.partial(load, "state", batch, run, head, keys, values))
        own, sources = (batch, tokens, head, keys), [refs[name] for name in plan.planes[part]]
        state_planes.load_planes(sources, own, buffers["dstate"], barriers["dstate"])
        # Its state is made while the tile of the chunk before is still read.
        _unless(place.stored)(load_corrected)
    wait("keys", first=True)
    for name in ("q", "k"):
        target = buffers[name]
        source = refs[name].at[batch, tokens, lax.div(head, plan.shape.group), keys]
        plgpu.copy_gmem_to_smem(source, target, barriers["keys"])


def _store(buffers, names, refs, plan: Plan, place: Place):
    """Send finished tiles and vectors to memory."""
    batch, chunk, head, block = place.locate(plan)
    keys = pl.ds(block * plan.key_block, plan.key_block)
    plgpu.commit_smem()
    for name in names:
        if name in ("dq", "dk"):
            own = (batch, pl.ds(chunk * CHUNK, CHUNK), head, keys)
        else:
            own = (block, batch, chunk, head)
        plgpu.copy_smem_to_gmem(buffers[name], refs[name].at[own])


def _dot_rows(ref, x: jax.Array) -> jax.Array:
    return (smem.matrix(ref) * x).sum(axis=1)


def _overlap(plan: Plan, buffers) -> list:
    """The products whose sum has `<S, G>` of this block as its trace."""
    rows = [pl.ds(i, CHUNK) for i in range(0, plan.key_block, CHUNK)]
    return [(buffers["state"].at[at], buffers["dstate"].at[:, at]) for at in rows]


def _next_state(plan: Plan, buffers, barriers):
    """`exp(b_C) S + (beta exp(b_C - b) k)^T u` in the place of `S`."""
    for i in range(0, plan.key_block, CHUNK):
        rows = pl.ds(i, CHUNK)
        state = smem.matrix(buffers["state"].at[rows])
        keys = smem.load_transposed(buffers["k"].at[:, rows], interpret=plan.interpret)
        if plan.shape.scalar_gate:
            total = buffers["b"][CHUNK - 1]
            state *= jnp.exp(total)
            rest = jnp.exp(total - smem.column(buffers["b_column"]))
            keys *= smem.over_columns(rest, keys.shape)
        if plan.shape.delta:
            keys *= smem.over_columns(smem.column(buffers["beta_column"]), keys.shape)
        pair = keys.astype(plan.shape.dtype), buffers["u"]
        state = mma.product(state.shape, pair, init=state, interpret=plan.interpret)
        if i == 0 and plan.shape.delta:
            plgpu.barrier_wait(barriers["read"])
        buffers["state"].at[rows][...] = state.astype(plan.shape.dtype)
    plgpu.commit_smem()
    if plan.shape.delta:
        plgpu.barrier_arrive(barriers["made"])


def _divisor(beta: jax.Array) -> jax.Array:
    """`beta`, but never 0."""
    return jnp.where(jnp.abs(beta) < SMALLEST_BETA, SMALLEST_BETA, beta)


def _weights(plan: Plan, buffers) -> jax.Array | float:
    """Return the factor of products of pairs; anything above the diagonal."""
    weights = pairs.pair_decay(buffers) if plan.shape.scalar_gate else 1.0
    if plan.weighs_pairs:
        beta = _divisor(smem.column(buffers["beta_column"]))
        weights *= smem.over_columns(beta, (CHUNK, CHUNK))
    return weights


def _store_pairs(plan: Plan, buffers, name: str, x: jax.Array):
    """Store `Y` or `X`, as one tile or as two whose sum it is."""
    if plan.halves:
        buffers[name][...], buffers[f"{name}_low"][...] = lanes.halves(x, interpret=plan.interpret)
    else:
        buffers[name][...] = x.astype(plan.shape.dtype)


def _pairs(buffers, name: str) -> list:
    """The tiles of `Y` or of `X`."""
    return [buffers[x] for x in (name, f"{name}_low") if x in buffers]


def _wait_vectors(plan: Plan, barriers):
    for name in plan.vectors[::2]:
        plgpu.barrier_wait(barriers[name])


def _query_products(plan: Plan, buffers, barriers, place: Place):
    """`do u^T`, `do S^T` and, with a gate, a product with the trace `<S, G>`."""
    shape, pair = (CHUNK, plan.key_block), (CHUNK, CHUNK)
    product = functools.partial(mma.product, interpret=plan.interpret)
    y = dq = overlap = None
    for part in range(plan.value_blocks):
        plgpu.barrier_wait(barriers["values"])
        y = product(pair, (buffers["do"], smem.transposed(buffers["u"])), init=y)
        pl.when(place.stored)(lambda: plgpu.barrier_wait(barriers["state"]))
        dq = product(shape, (buffers["do"], smem.transposed(buffers["state"])), init=dq)
        # Without a gate too: `dq` takes the place of what is loaded.
        plgpu.barrier_wait(barriers["dstate"])
        if plan.shape.scalar_gate:
            overlap = product(pair, *_overlap(plan, buffers), init=overlap)
        if part == 0:
            _wait_vectors(plan, barriers)
        plgpu.barrier_arrive(barriers["freed_values"])
        pl.when(place.last)(lambda: plgpu.barrier_arrive(barriers["freed_state"]))
    return y, dq, overlap


def _query_step(plan: Plan, refs, buffers, barriers, place: Place):
    """`dq` of one chunk, `Y` for the other warpgroup, and the state of the next chunk."""
    shape = (CHUNK, plan.key_block)
    y, dq, overlap = _query_products(plan, buffers, barriers, place)
    if plan.shape.scalar_gate:
        overlap = lanes.diagonal(overlap, interpret=plan.interpret)
    y = lanes.masked(y * _weights(plan, buffers), interpret=plan.interpret)
    pl.when(place.step > 0)(lambda: plgpu.barrier_wait(barriers["free"]))
    _store_pairs(plan, buffers, "y", y)
    if plan.weighs_keys:
        plgpu.barrier_wait(barriers["keys"])
        beta = smem.over_rows(smem.row(buffers["beta"]), shape)
        buffers["beta_k"][...] = (smem.matrix(buffers["k"]) * beta).astype(plan.shape.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers["ready"])
    if plan.shape.scalar_gate:
        dq *= smem.over_rows(jnp.exp(smem.row(buffers["b"])), shape)
    if not plan.weighs_keys:
        plgpu.barrier_wait(barriers["keys"])

    @_unless(place.last)
    def _():
        _next_state(plan, buffers, barriers)
        plgpu.barrier_arrive(barriers["freed_state"])

    pairs = [(y, buffers[plan.keys]) for y in _pairs(buffers, "y")]
    dq = plan.scale * mma.product(shape, *pairs, init=dq, interpret=plan.interpret)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffers["dq"][...] = dq.astype(plan.shape.dtype)
    if plan.shape.scalar_gate:
        buffers["overlap"][...] = overlap
        buffers["db_q"][...] = _dot_rows(buffers["q"], dq)
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers["freed_keys"])
    _store(
        buffers, ("dq", "db_q", "overlap") if plan.shape.scalar_gate else ("dq",), refs, plan, place
    )


def _pair_step(plan: Plan, buffers, x):
    """Store `diag(dv u^T)` and `-X / scale`."""
    buffers["diagonal"][...] = lanes.diagonal(x, interpret=plan.interpret)
    x = lanes.masked(x * _weights(plan, buffers), operator.gt, interpret=plan.interpret)
    # Over scale, so that it adds to the products that the scale multiplies.
    _store_pairs(plan, buffers, "x", x * (-1 / plan.scale))
    plgpu.commit_smem()


def _key_products(plan: Plan, buffers, barriers, place: Place):
    """`u G^T` and, with the delta rule, `dv S^T`."""
    shape, pair = (CHUNK, plan.key_block), (CHUNK, CHUNK)
    product = functools.partial(mma.product, interpret=plan.interpret)
    w = x = r = None
    _wait_vectors(plan, barriers)
    for part in range(plan.value_blocks):
        plgpu.barrier_wait(barriers["values"])
        if plan.shape.delta:
            plgpu.barrier_wait(barriers["dv"])
            x = product(pair, (buffers["dv"], smem.transposed(buffers["u"])), init=x)
            if part == plan.value_blocks - 1:
                _pair_step(plan, buffers, x)
            pl.when(place.stored)(lambda: plgpu.barrier_wait(barriers["state"]))
            made = functools.partial(plgpu.barrier_wait, barriers["made"])
            _unless(place.stored)(made)
            r = product(shape, (buffers["dv"], smem.transposed(buffers["state"])), init=r)
            read = functools.partial(plgpu.barrier_arrive, barriers["read"])
            _unless(place.last)(read)
        plgpu.barrier_wait(barriers["dstate"])
        w = product(shape, (buffers["u"], buffers["dstate"]), init=w)
        plgpu.barrier_arrive(barriers["freed_values"])
        plgpu.barrier_arrive(barriers["freed_state"])
    return w, r


def _of_tokens(plan: Plan, buffers, w, r):
    """`u G^T` and `dv S^T` times what their rows have in `W` and in `R`."""
    weights = [_divisor(smem.row(buffers["beta"]))] if plan.weighs_pairs else []
    if plan.shape.scalar_gate:
        weights += [jnp.exp(buffers["b"][CHUNK - 1] - smem.row(buffers["b"]))]
    if weights:
        w *= smem.over_rows(functools.reduce(operator.mul, weights), w.shape)
    if plan.shape.delta:
        read = -1 / plan.scale
        if plan.shape.scalar_gate:
            read = smem.over_rows(read * jnp.exp(smem.row(buffers["b"])), r.shape)
        r *= read
    return w, r


def _key_step(plan: Plan, refs, buffers, barriers, place: Place):
    """`dk` and the gradients of the gates of one chunk."""
    shape = (CHUNK, plan.key_block)
    product = functools.partial(mma.product, interpret=plan.interpret)
    # `W / scale` or, where pairs are weighed, `beta W / scale`; `-R / scale`.
    w, r = _key_products(plan, buffers, barriers, place)
    w, r = _of_tokens(plan, buffers, w, r)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_wait(barriers["keys"])
    # What the other warpgroup waits for is done as soon as can be after what this one waits for.
    ready = functools.partial(plgpu.barrier_wait, barriers["ready"])
    free = functools.partial(plgpu.barrier_arrive, barriers["free"])
    if plan.weighs_keys:
        ready()
    keys = buffers[plan.keys]
    if plan.shape.scalar_gate:
        # At once, and `beta` is loaded again below, as registers are short here.
        buffers["db_write"][...] = _dot_rows(keys, w)
    pairs = [(smem.transposed(y), buffers["q"]) for y in _pairs(buffers, "y")]
    if plan.shape.delta:
        pairs += [(smem.transposed(x), buffers["k"]) for x in _pairs(buffers, "x")]
        r = product(shape, *((x, keys) for x in _pairs(buffers, "x")), init=r)
    if not plan.weighs_keys:
        ready()
    w = product(shape, *pairs, init=w)
    if not plan.weighs_keys:
        free()
    if plan.shape.scalar_gate or plan.weighs_pairs:
        write = _dot_rows(keys, w)
    if plan.shape.scalar_gate:
        db = -write
    names = ["dk"]
    if plan.shape.delta:
        beta = smem.row(buffers["beta"])
        divisor = _divisor(beta)
        dbeta = write / divisor if plan.weighs_pairs else _dot_rows(buffers["k"], w)
        if plan.shape.scalar_gate:
            db += _dot_rows(buffers["k"], r)
    if plan.weighs_keys:
        plgpu.commit_smem()
        free()
    if plan.shape.delta:
        own = beta / divisor if plan.weighs_pairs else beta
        w = w * smem.over_rows(own, shape) + r
        dbeta *= plan.scale
        other = smem.row(buffers["diagonal"]) / (jnp.maximum(beta, SMALL_BETA) * plan.key_blocks)
        both = DIAGONAL * other + (1 - DIAGONAL) * dbeta
        buffers["dbeta"][...] = jnp.where(beta > SMALL_BETA, both, dbeta)
        names += ["dbeta"]
    buffers["dk"][...] = (plan.scale * w).astype(plan.shape.dtype)
    if plan.shape.scalar_gate:
        buffers["db_k"][...] = plan.scale * db
        names += ["db_k", "db_write"]
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers["freed_keys"])
    _store(buffers, names, refs, plan, place)


def _body(plan: Plan, names, *args):
    *refs, buffers, every = args
    barriers = {
        name: every[arrivals].at[i]
        for arrivals, names in plan.barriers.items()
        for i, name in enumerate(names)
    }
    refs = dict(zip(names, refs, strict=True))
    refs |= {name: refs[place] for name, place in plan.in_place.items()}
    role = lax.axis_index("role")

    def walk(work):
        program = lax.axis_index("program")
        items = lax.div(plan.items - program + plan.programs - 1, plan.programs)

        def run(i, step):
            item = program + i * plan.programs
            length = plan.length(item)

            def chunk(turn, step):
                first = (lanes.zero(interpret=plan.interpret),) * len(plan.places)
                own = {x: ref.at[first] for x, ref in buffers.items() if x not in plan.vectors}
                at = slice(None) if work is _load else lax.rem(step, 2)
                own |= {x: buffers[x].at[at] for x in plan.vectors}
                ends = (turn == 0, turn + 1 == length) if plan.stride > 1 else (True, True)
                work(plan, refs, own, barriers, Place(item, turn, step, *ends))
                return step + 1

            return lax.fori_loop(0, length, chunk, step)

        lax.fori_loop(0, items, run, jnp.int32(0))

    @pl.when(role == 0)
    def _():
        plgpu.set_max_registers(232, action="increase")
        walk(_query_step)
        plgpu.barrier_wait(barriers["free"])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == 1)
    def _():
        plgpu.set_max_registers(240, action="increase")
        walk(_key_step)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == 2)
    def _():
        plgpu.set_max_registers(32, action="decrease")
        walk(_load)
        for name in ("freed_values", "freed_state", "freed_keys"):
            plgpu.barrier_wait(barriers[name])


def _launch(plan: Plan, inputs: dict, cotangents: dict, interpret):
    shape, array = plan.shape, functools.partial(compat.type_like, inputs["q"])
    keys = array((shape.batch, shape.tokens, shape.heads, shape.key_dim), shape.dtype)
    vector = (plan.key_blocks, shape.batch, shape.chunks, shape.heads, CHUNK)
    vector = array(vector, jnp.float32)
    outputs = {} if "dk" in plan.in_place else {"dk": keys}
    if shape.delta:
        outputs |= {"dbeta": vector}
    if shape.scalar_gate:
        outputs |= dict.fromkeys(GATE_PARTS, vector)
    names = (*inputs, *cotangents, *outputs)
    body, scratch = functools.partial(_body, plan, names), _scratch(plan)

    def run(*refs):
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes="role")

    kernel = pl.kernel(
        launches.named("chunk_gradients", run),
        out_type=tuple(outputs.values()),
        mesh=plgpu.Mesh(
            grid=(plan.programs,), grid_names=("program",), num_threads=3, thread_name="role"
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=False),
        interpret=interpret,
    )
    arrays = inputs.values(), cotangents.values(), outputs.values()
    held, out = launches.overwriting(kernel, *arrays)
    held, out = (
        dict(zip(names, x, strict=True)) for names, x in ((cotangents, held), (outputs, out))
    )
    return out | {name: held[place] for name, place in plan.in_place.items()}


def chunk_gradients(
    shape: Shape, q, k, u, do, dv, states, cotangents, *, beta, b, scale, interpret=None
):
    """`dq`, `dk`, `dbeta` and `dg` of all chunks.

    Args:
        shape: Sizes and variant of the call.
        q: `[B, T, H, K]` with T a multiple of 64.
        k: The same shape.
        u: Corrected values (the values themselves without the delta rule), `[B, T, HV, V]`.
        do: Gradient of the outputs, `[B, T, HV, V]`.
        dv: Gradient of the values, `[B, T, HV, V]`; unused without the delta rule.
        states: State entering every `state_planes.stride`-th chunk, `[B, N', HV, K, V]`.
        cotangents: Gradient of the state leaving each chunk, over `scale`: the `planes` by name,
            each `[B, T, HV, K]`. `dq` and `dk` take the place of the first
            two; at V = 64, with one plane, only `dq` does.
        beta: `[B, N, HV, C]` float32, or `None` without the delta rule.
        b: In-chunk cumulative log-decay, `[B, N, HV, C]` float32, or `None` without a gate.
        scale: Factor on `q`.
        interpret: Interpreter parameters, or `None` for the device.

    Returns:
        `dq`, `dk` `[B, T, HV, K]` (one for each value head), `dbeta` `[B, N, HV, C]` and `dg`
        `[B, T, HV]` float32, or `None`.
    """
    plan = Plan(shape=shape, scale=float(scale), interpret=interpret is not None)
    inputs = {"q": q, "k": k, "u": u, "do": do, "state": states}
    if shape.delta:
        inputs |= {"dv": dv}
    inputs |= {name: beta if name.startswith("beta") else b for name in plan.vectors}
    out = _launch(plan, inputs, cotangents, interpret)
    dbeta = out["dbeta"].sum(0) if shape.delta else None
    if not shape.scalar_gate:
        return out["dq"], out["dk"], dbeta, None
    parts = {name: out[name] for name in GATE_PARTS}
    dg = gate_vectors.gate_gradient(parts, b, scale=plan.scale, interpret=interpret)
    return out["dq"], out["dk"], dbeta, dg
