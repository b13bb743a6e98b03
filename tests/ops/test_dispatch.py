"""The choice of an implementation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deltanet_jax as d
from deltanet_jax.ops import dispatch
from deltanet_jax.ops.canonical import canonical_problem
from tests.cases import PORTABLE


def inputs(T=20, K=4, V=6):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k = (jax.random.normal(key, (1, T, 2, K)) for key in keys[:2])
    return q, k, jax.random.normal(keys[2], (1, T, 2, V)), jnp.full((1, T, 2), 0.5)


def spy(calls):
    def algorithm(problem, chunk_size):
        calls.append((problem, chunk_size))
        return dispatch.IMPLEMENTATIONS["recurrent"].algorithm(problem, chunk_size)

    return algorithm


def test_a_callable_gets_the_canonical_problem():
    calls = []
    q, k, v, beta = inputs()
    o, state = d.delta_rule(q, k, v, beta, implementation=spy(calls), chunk_size=7)
    (problem, chunk_size), *rest = calls
    assert not rest
    assert chunk_size == 7
    assert problem.scale == 0.5
    assert problem.g is None
    assert problem.reset is None
    expected = d.delta_rule(q, k, v, beta, implementation="recurrent", chunk_size=7)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(state, expected[1])


def test_the_first_of_a_sequence_that_can_runs():
    calls = []
    q, k, v, beta = inputs()
    d.delta_rule(q, k, v, beta, implementation=["pallas", spy(calls), "recurrent"])
    assert len(calls) == 1


def test_pallas_in_a_sequence_counts_on_its_hardware_alone():
    with pytest.raises(NotImplementedError, match="'pallas': the kernels need a Hopper GPU"):
        d.delta_rule(*inputs(), implementation=("pallas",))


def test_why_not_gives_the_reason_that_the_call_raises():
    q, k, v, beta = inputs(K=5)
    reason = d.why_not("pallas", q, k, v, beta=beta)
    assert isinstance(reason, str)
    with pytest.raises(NotImplementedError) as error:
        d.delta_rule(q, k, v, beta, implementation="pallas")
    assert reason in str(error.value)


@pytest.mark.parametrize("name", [*PORTABLE, lambda p, c: None])
def test_nothing_speaks_against_the_portable_forms(name):
    q, k, v, beta = inputs()
    g = jnp.zeros((1, 20, 2, 4))
    assert d.why_not(name, q, k, v, g=g, beta=beta, segment_ids=jnp.zeros((1, 20), int)) is None


def test_why_not_takes_shapes_and_computes_nothing():
    q, k, v, beta = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs())
    assert d.why_not("chunkwise", q, k, v, beta=beta, chunk_size=16) is None
    with pytest.raises(ValueError, match="`beta` must have shape"):
        d.why_not("chunkwise", q, k, v, beta=q)
    with pytest.raises(ValueError, match="`implementation` must be one of"):
        d.why_not("flash", q, k, v)


@pytest.mark.parametrize("T", [0, 1, 2, 17, 100])
def test_the_default_runs_every_length_and_takes_the_recurrence_for_one_token(T):
    q, k, v, beta = inputs(T)
    o, state = d.delta_rule(q, k, v, beta)
    name = "recurrent" if T <= 1 else "chunkwise_solve"
    expected = d.delta_rule(q, k, v, beta, implementation=name)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(state, expected[1])


def test_a_platform_with_kernels_takes_them_only_for_calls_they_cover(monkeypatch):
    """A stand-in for a GPU's package of kernels; what it is asked decides."""

    class Kernels:
        calls = 0

        @staticmethod
        def why_not(problem, chunk_size):
            return None if problem.q.shape[-1] == 4 else "K is not 4"

        @classmethod
        def chunkwise(cls, problem, chunk_size=None, *, interpret=False):
            assert not interpret
            cls.calls += 1
            return dispatch.IMPLEMENTATIONS["chunkwise"].algorithm(problem, chunk_size)

    monkeypatch.setattr(dispatch, "KERNEL_PLATFORMS", ("cpu",))
    monkeypatch.setattr(dispatch, "_kernels", lambda platform: Kernels)
    d.delta_rule(*inputs(T=33, K=8))
    assert Kernels.calls == 0
    q, k, v, beta = inputs(T=33, K=8)
    with pytest.raises(NotImplementedError, match="K is not 4"):
        d.delta_rule(q, k, v, beta, implementation="pallas")
    d.delta_rule(*inputs(T=33))
    d.delta_rule(*inputs(T=34), implementation=("pallas", "recurrent"))
    assert Kernels.calls == 2


@pytest.mark.parametrize(("T", "scans"), [(17, True), (2**15, True), (2**15 + 1, False)])
def test_a_gpu_without_kernels_for_the_call_scans_chunk_maps_while_they_are_few(
    monkeypatch, T, scans
):
    """Heads of 128 in float32, 2 of them: 512 chunks have as many numbers as are few."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    form_2 = dispatch.IMPLEMENTATIONS["chunkwise"].algorithm
    chosen = []

    def ask(x):
        missing = dict.fromkeys(("g", "scale", "initial_state", "segment_ids", "precision"))
        problem = canonical_problem(x, x, x, beta=x[..., 0], **missing)
        chosen.append(dispatch.choose(None, problem, None))
        return x

    jax.eval_shape(ask, jax.ShapeDtypeStruct((1, T, 2, 128), jnp.float32))
    assert chosen == [dispatch.associative_chunks if scans else form_2]


def test_the_scan_that_a_gpu_takes_is_that_over_chunks_of_64_tokens():
    q, k, v, beta = inputs(T=150)
    for size, chunk in ((None, 64), (16, 16)):
        got = d.delta_rule(
            q, k, v, beta, implementation=dispatch.associative_chunks, chunk_size=size
        )
        expected = d.delta_rule(q, k, v, beta, implementation="associative", chunk_size=chunk)
        chex.assert_trees_all_equal(got, expected)


@pytest.mark.parametrize("device", [jax.devices("cpu")[0], "cpu"], ids=["device", "name"])
def test_under_jit_the_default_device_decides_and_not_the_first_backend(monkeypatch, device):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    seen = []

    def algorithm(problem, chunk_size):
        seen.append(dispatch._platform(problem))
        return dispatch.IMPLEMENTATIONS["recurrent"].algorithm(problem, chunk_size)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs()]
    call = lambda *x: d.delta_rule(*x, implementation=algorithm)  # noqa: E731
    jax.eval_shape(call, *shapes)
    with jax.default_device(device):
        jax.eval_shape(lambda *x: call(*x), *shapes)
    assert seen == ["gpu", "cpu"]


def test_equal_shapes_are_traced_once_whatever_the_segments():
    traces = []

    @jax.jit
    def call(q, k, v, beta, segment_ids):
        traces.append(1)
        return d.delta_rule(q, k, v, beta, segment_ids=segment_ids)

    for ids in ([0] * 20, [0] * 5 + [1] * 15, list(range(20))):
        call(*inputs(), jnp.asarray([ids]))
    assert len(traces) == 1


def test_a_call_outside_jit_is_compiled_once_per_shape():
    calls = []
    algorithm = spy(calls)
    for _ in range(3):
        d.delta_rule(*inputs(), implementation=algorithm)
    assert len(calls) == 1
