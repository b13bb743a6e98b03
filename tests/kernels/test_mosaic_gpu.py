"""The Hopper kernels in the CPU interpreter, against the float64 oracle."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from deltanet_jax.kernels import mosaic_gpu
from deltanet_jax.kernels.mosaic_gpu import gate_vectors, program, run_states_fused, split, support
from deltanet_jax.kernels.mosaic_gpu.blocks import launches
from deltanet_jax.kernels.mosaic_gpu.shape import Shape as KernelShape
from tests.cases import DEGENERATE, Shape, degenerate
from tests.kernels.gpu_problems import errors, inputs, outputs_and_gradients, problem
from tests.oracle import cotangents_for, expected
from tests.tolerances import TOLERANCES, assert_close, relative_rms

interpreted = pytest.mark.skipif(
    jax.__version_info__ < support.OLDEST_JAX,
    reason=f"the GPU interpreter needs jax 0.11.2; this is {jax.__version__}",
)


def _run(p):
    return mosaic_gpu.chunkwise(p, interpret=True)


def _check(x, dtype="bfloat16", limits=None):
    forward, gradient = limits or TOLERANCES[dtype]
    for name, error in errors(_run, x, dtype).items():
        limit = forward if name in ("o", "state") else gradient
        assert error <= limit, f"{name}: {error:.2e} above {limit}"


CASES = {
    "delta": {"T": 130},
    "gated-delta": {"T": 100, "HV": 2, "gate": 0.2, "segments": True},
    "strong-gate": {"T": 70, "gate": 5.0},
    "linear": {"T": 64, "delta": False},
    "gated-linear": {"T": 70, "delta": False, "gate": 5.0},
    "kda": {"T": 70, "HV": 2, "gate": 0.2, "channels": True, "segments": True},
    "strong-gla": {"T": 60, "delta": False, "gate": 20.0, "channels": True},
    "both-128": {"T": 190, "HV": 2, "K": 128, "V": 128},
    "keys-128": {"T": 130, "K": 128, "delta": False},
    "gated-values-128": {"T": 70, "HV": 2, "V": 128, "gate": 0.2, "segments": True},
    "gated-both-128": {"T": 190, "K": 128, "V": 128, "gate": 0.2},
    "both-256": {"T": 70, "K": 256, "V": 256, "gate": 0.2},
    "kda-values-128": {"T": 70, "HV": 2, "V": 128, "gate": 0.2, "channels": True},
    "odd-sizes": {"T": 70, "HV": 2, "K": 24, "V": 50},
    "gated-odd-sizes": {"T": 70, "K": 96, "V": 100, "gate": 0.2},
    "wide-values": {"T": 70, "H": 2, "HV": 4, "V": 300, "gate": 0.2, "segments": True},
    "wide-keys": {"T": 70, "H": 2, "HV": 4, "K": 300, "V": 40, "delta": False},
    "kda-wide-values": {"T": 66, "H": 2, "HV": 4, "K": 50, "V": 140, "gate": 0.2, "channels": True},
    "gla-wide": {
        "T": 66,
        "H": 2,
        "HV": 4,
        "K": 136,
        "V": 72,
        "gate": 5.0,
        "delta": False,
        "channels": True,
    },
}


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_recurrence(name):
    _check(inputs(**CASES[name]))


@interpreted
@pytest.mark.parametrize("gate", [None, 0.2], ids=["delta", "gated-delta"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tokens_that_write_nothing_have_a_gradient_of_beta(dtype, gate):
    """In bfloat16 the gradients weigh pairs of tokens by a beta that is never 0."""
    x = inputs(T=130, gate=gate, dtype=dtype)
    x["beta"][:, 1::7] = 1e-30
    x["beta"][:, ::3] = 0.0
    _check(x, dtype)
    got = outputs_and_gradients(_run, x, dtype)
    dk, dbeta = (np.asarray(got[name], np.float32)[:, ::3] for name in ("dk", "dbeta"))
    assert np.all(dk == 0)
    assert np.all(dbeta != 0)


@interpreted
@pytest.mark.parametrize("variant", ["linear", "gated_delta", "kda"])
@pytest.mark.parametrize("scale", [None, 0.0, -0.7])
def test_degenerate_values_equal_the_recurrence(variant, scale):
    """Eight rows of the batch, each with another value that a formula could trip over."""
    x = degenerate(variant, Shape(1, 66, 1, 64, 64))
    x |= {n: np.asarray(jnp.asarray(x[n], "bfloat16").astype(jnp.float32)) for n in "qkv"}

    def run(p):
        return _run(p if scale is None else dataclasses.replace(p, scale=scale))

    do, dstate = cotangents_for(x)
    do = np.asarray(jnp.asarray(do).astype("bfloat16").astype(jnp.float32))
    want = expected(x, (do, dstate), scale)
    wanted = {"o": want.o, "state": want.state}
    wanted |= {f"d{name}": g for name, g in want.gradients.items()}
    got = outputs_and_gradients(run, x, "bfloat16")
    forward, gradient = TOLERANCES["bfloat16"]
    for name, tensor in wanted.items():
        limit = forward if name in ("o", "state") else gradient
        for row, case in enumerate(DEGENERATE):
            assert_close(f"{name}, {case}", np.float32(got[name][row]), tensor[row], limit)


@interpreted
@pytest.mark.parametrize("gate", [None, 0.1], ids=["delta", "gated-delta"])
def test_the_hardest_keys_stay_within_8e_3(gate):
    _check(inputs(T=64, cos=0.9, largest_beta=2.0, gate=gate), limits=(8e-3, 8e-3))


@interpreted
@pytest.mark.parametrize("size", [128, 64])
@pytest.mark.parametrize(
    "case",
    [{"T": 330, "HV": 2}, {"T": 60, "HV": 4}, {"T": 200, "HV": 2, "gate": 0.2, "segments": True}],
    ids=["delta", "one-chunk", "gated-delta"],
)
def test_inverses_on_the_way_equal_the_recurrence(monkeypatch, fused_launches, case, size):
    """With one SM every head is its own thread block, or every pair of heads."""
    monkeypatch.setattr(program, "sm_count", lambda: 1)
    x = inputs(K=size, V=size, **case)
    o, state = _run(problem(x))
    want = expected(x, cotangents_for(x))
    assert relative_rms(np.asarray(o, np.float32), want.o) <= TOLERANCES["bfloat16"][0]
    assert relative_rms(np.asarray(state), want.state) <= TOLERANCES["bfloat16"][0]
    assert fused_launches


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        {"T": 200, "HV": 3},
        {"T": 60, "HV": 2},
        {"T": 200, "HV": 3, "gate": 0.2, "segments": True},
        {"T": 200, "HV": 3, "gate": 0.2, "channels": True, "delta": False},
    ],
    ids=["delta", "one-chunk", "gated-delta", "gla"],
)
def test_two_heads_in_a_program_equal_the_recurrence(monkeypatch, case):
    """With one SM; of three heads the last has its own thread block."""
    monkeypatch.setattr(program, "sm_count", lambda: 1)
    _check(inputs(**case))


@pytest.mark.parametrize(
    ("heads", "sizes", "options", "wanted"),
    [
        (132, (64, 64), {}, 1),
        (133, (64, 64), {}, 2),
        (133, (64, 64), {"save": True}, 2),
        (133, (64, 64), {"reverse": True}, 2),
        (133, (64, 128), {}, 1),
        (133, (128, 64), {}, 1),
    ],
)
def test_programs_of_small_heads_have_two_where_multiprocessors_have(heads, sizes, options, wanted):
    q, v = (jax.ShapeDtypeStruct((1, 64, heads, size), "bfloat16") for size in sizes)
    shape = KernelShape.of(q=q, v=v, gate="none", delta=False)
    plan = program.Plan(shape=shape, interpret=False, **options)
    assert plan.config.items == wanted


@pytest.mark.parametrize(
    ("heads", "size", "dtype", "save", "wanted"),
    [
        (128, 128, "bfloat16", False, True),
        (128, 128, "bfloat16", True, False),
        (128, 128, "float16", False, False),
        (128, 256, "bfloat16", False, False),
        (66, 128, "bfloat16", False, False),
        (256, 64, "bfloat16", False, True),
        (255, 64, "bfloat16", False, False),
        (160, 64, "bfloat16", False, False),
        (320, 64, "bfloat16", False, False),
        (512, 64, "bfloat16", False, True),
    ],
)
def test_one_kernel_covers_heads_that_fill_the_multiprocessors(heads, size, dtype, save, wanted):
    keys = jax.ShapeDtypeStruct((1, 64, heads, size), dtype)
    shape = KernelShape.of(q=keys, v=keys, gate="none", delta=True)
    assert run_states_fused.covers(shape, save=save) == wanted


@interpreted
@pytest.mark.parametrize(
    "gate",
    [{}, {"gate": 0.2}, {"gate": 0.2, "channels": True}],
    ids=["delta", "gated-delta", "kda"],
)
def test_split_sequences_equal_the_recurrence(monkeypatch, gate):
    monkeypatch.setattr(split, "pieces_of", lambda *sizes: 2)
    _check(inputs(T=330, **gate))


@interpreted
@pytest.mark.parametrize(("pieces", "delta"), [(1, True), (2, False)])
def test_no_initial_state_is_one_of_zeros(monkeypatch, pieces, delta):
    monkeypatch.setattr(split, "pieces_of", lambda *sizes: pieces)
    x = inputs(T=128, delta=delta)
    zeros = outputs_and_gradients(_run, x | {"initial_state": 0 * x["initial_state"]}, "bfloat16")
    del x["initial_state"]
    for name, got in outputs_and_gradients(_run, x, "bfloat16").items():
        np.testing.assert_array_equal(np.asarray(got), np.asarray(zeros[name]))


@interpreted
@pytest.mark.parametrize("used", ["o", "state"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_result_that_is_not_used_has_a_cotangent_of_zeros(monkeypatch, pieces, used):
    monkeypatch.setattr(split, "pieces_of", lambda *sizes: pieces)
    arrays = {name: jnp.asarray(value) for name, value in inputs(T=128).items()}

    def results(arrays):
        return dict(zip(("o", "state"), _run(problem(arrays)), strict=True))

    (o, state), pull = jax.vjp(lambda arrays: _run(problem(arrays)), arrays)
    cotangents = {"o": jnp.ones_like(o), "state": jnp.ones_like(state)}
    zeros = jax.tree.map(jnp.zeros_like, cotangents)
    (want,) = pull(tuple((zeros | {used: cotangents[used]}).values()))
    got = jax.grad(lambda arrays: jnp.sum(results(arrays)[used].astype(jnp.float32)))(arrays)
    chex.assert_trees_all_equal(got, want)
    assert all(bool(jnp.any(x != 0)) for name, x in got.items() if name != "q" or used == "o")


@interpreted
@pytest.mark.parametrize("channels", [False, True])
def test_a_reset_by_the_gate_forgets_exactly(channels):
    p = problem(inputs(T=64, gate=0.1, channels=channels))
    p = p.with_tokens(g=p.g.at[:, 40].set(-jnp.inf))
    other = p.with_tokens(v=p.v.at[:, :40].multiply(-3))
    after, expected = (np.asarray(_run(x)[0], np.float32)[:, 40:] for x in (p, other))
    np.testing.assert_array_equal(after, expected)


@interpreted
def test_a_gate_that_forgets_gets_no_gradient():
    """As of its maximum with `LOWEST_GATE`, which only the kernel takes."""
    p = problem(inputs(T=64, gate=0.1, delta=False))
    g = p.g.at[:, 40].set(-jnp.inf)
    dg = jax.grad(lambda g: jnp.sum(_run(p.with_tokens(g=g))[1]))(g)
    assert np.all(np.isfinite(dg))
    assert np.all(np.asarray(dg[:, 40]) == 0)
    assert np.all(np.asarray(dg[:, 41:]) != 0)


@interpreted
@pytest.mark.parametrize(("heads", "delta"), [(1, True), (3, False), (33, True)])
def test_vectors_of_the_gates_equal_those_in_float64(heads, delta):
    rng = np.random.default_rng(heads)
    g = -rng.random((2, 128, heads), dtype=np.float32)
    g[rng.random(g.shape) < 0.02] = -np.inf
    beta = rng.random(g.shape, dtype=np.float32) if delta else None
    got = gate_vectors.gate_vectors(g, beta, interpret=plgpu.InterpretGPUParams())
    got = {name: np.asarray(x) for name, x in got._asdict().items() if x is not None}

    def chunks(x):
        return np.swapaxes(x.reshape(2, 2, support.CHUNK, heads), 2, 3)

    if delta:
        np.testing.assert_array_equal(got["beta"], chunks(beta))
    b = got["b"]
    g = np.maximum(g, support.LOWEST_GATE)
    np.testing.assert_allclose(b, np.cumsum(chunks(g), -1, np.float64), rtol=1e-6)
    for name, x in {"decay": b, "rest": b[..., -1:] - b}.items():
        np.testing.assert_allclose(got[name], np.exp(np.float64(x)), rtol=1e-6, atol=1e-37)
    assert got.keys() == {"b", "decay", "rest"} | ({"beta"} if delta else set())


@interpreted
@pytest.mark.parametrize("gate", [None, 0.2])
def test_gradients_are_traced_inside_shard_map(gate):
    """With the types of `shard_map` checked; nothing is run."""
    x = inputs(B=2, T=70, gate=gate)
    arrays = {name: jnp.asarray(value) for name, value in x.items()}

    def loss(arrays):
        o, state = mosaic_gpu.chunkwise(problem(arrays))
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = {name: PartitionSpec("data") for name in arrays}
    mapped = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(spec,), out_specs=spec)
    shapes = jax.eval_shape(mapped, arrays)
    assert {name: y.shape for name, y in shapes.items()} == {n: y.shape for n, y in x.items()}


def test_pieces_fill_the_gpu_only_where_heads_do_not():
    assert split.pieces_of(1, 512, 16, 128, 128) == 8
    assert split.pieces_of(1, 2048, 16, 128, 128) == 8
    assert split.pieces_of(8, 64, 16, 128, 128) == 1
    assert split.pieces_of(1, 100, 1, 128, 128) == 1


def test_chained_pieces_equal_the_whole():
    rng = np.random.default_rng(0)
    maps = rng.standard_normal((4, 2, 8, 8)).astype("float32") / 3
    offsets = rng.standard_normal((4, 2, 8, 7)).astype("float32")  # of which 5 count
    first = rng.standard_normal((1, 2, 8, 5)).astype("float32")
    state, cotangent = first[0], first[0]
    entering = split.chain(first, (maps,), offsets, 4, reverse=False)
    leaving = split.chain(first, (maps,), offsets, 4, reverse=True)
    offsets = offsets[..., :5]
    for p in range(4):
        np.testing.assert_allclose(entering[p], state, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(leaving[3 - p], cotangent, rtol=1e-5, atol=1e-5)
        state = maps[p] @ state + offsets[p]
        cotangent = np.swapaxes(maps[3 - p], 1, 2) @ cotangent + offsets[3 - p]


@interpreted
@pytest.mark.parametrize("key_dim", split.CHAINED)
@pytest.mark.parametrize("reverse", [False, True])
def test_the_kernel_chains_as_float32_does(key_dim, reverse):
    """More pieces than maps in shared memory; products of halves keep 16 bits of mantissa."""
    rng = np.random.default_rng(0)
    pieces = 5
    maps = rng.standard_normal((2 * pieces, 2, key_dim, key_dim)) / key_dim**0.5
    offsets = rng.standard_normal((2 * pieces, 2, key_dim, 72))  # of which 64 count
    first = rng.standard_normal((2, 2, key_dim, 64))
    maps, offsets, first = (jnp.asarray(x, jnp.float32) for x in (maps, offsets, first))
    want = split.chain(first, (maps,), offsets, pieces, reverse=reverse)
    terms = split.terms_of(maps)
    interpret = plgpu.InterpretGPUParams()
    got = split.chain(first, terms, offsets, pieces, reverse=reverse, interpret=interpret)
    assert relative_rms(np.asarray(got), np.asarray(want)) <= 1e-4


def test_more_shared_memory_than_a_thread_block_has_is_refused():
    scratch = plgpu.SMEM((1024, 57), jnp.float32)
    out = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(NotImplementedError, match="`large` needs 233472 bytes"):
        launches.launch("large", None, jnp.ones(8), out, scratch, programs=1, interpret=None)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16 or float16"),
        ({"K": 264}, "K of at most 256; got K=264"),
    ],
)
def test_reasons_are_named(case, reason):
    x = inputs(T=4, **case)
    assert reason in mosaic_gpu.why_not(problem(x, case.get("dtype", "bfloat16")), None)


def test_another_chunk_size_is_refused():
    assert "chunks of 64" in mosaic_gpu.why_not(problem(inputs(T=4)), 32)


def test_wide_heads_beside_a_gate_per_channel_are_refused():
    p = problem(inputs(T=4, K=256, gate=0.1, channels=True))
    assert "a vector gate the Hopper kernels need K of at most 128" in mosaic_gpu.why_not(p, None)
