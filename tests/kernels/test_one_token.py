"""The decoding kernel in the CPU interpreter, and where it is used."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from deltanet_jax import step
from deltanet_jax.kernels import mosaic_gpu
from deltanet_jax.kernels.mosaic_gpu import support
from deltanet_jax.ops import dispatch
from tests.kernels import gpu_problems
from tests.kernels.test_mosaic_gpu import interpreted
from tests.oracle import cotangents_for, expected
from tests.tolerances import TOLERANCES, assert_close, relative_rms

RUN = functools.partial(mosaic_gpu.one_token, interpret=True)
BOTH = pytest.mark.parametrize("in_place", [False, True], ids=["new-array", "in-place"])


def inputs(**sizes):
    """Draw one token; with a vector gate if `channels`."""
    channels = sizes.pop("channels", False)
    x = gpu_problems.inputs(**{"B": 2, "T": 1, "dtype": "float32"} | sizes)
    if channels:
        rng = np.random.default_rng(0)
        x["g"] = -rng.random((*x["beta"].shape, x["q"].shape[-1])).astype(np.float32)
    return x


def problem(x):
    return gpu_problems.problem(x, "float32")


def outputs(x, in_place):
    return jax.jit(lambda x: RUN(problem(x), in_place=in_place))(x)


@interpreted
@pytest.mark.parametrize(
    ("case", "in_place"),
    [
        ({}, True),
        ({"HV": 2, "V": 128, "gate": 5.0}, False),
        ({"K": 128, "channels": True}, True),
        ({"K": 256, "delta": False, "gate": 1.0}, True),
    ],
    ids=["delta", "grouped-gated-delta", "kda", "gated-linear"],
)
def test_one_token_equals_the_recurrence(case, in_place):
    x = inputs(**case)
    want = expected(x, cotangents_for(x))
    o, state = outputs(x, in_place)
    assert_close("o", o, want.o, TOLERANCES["float32"].forward)
    assert_close("state", state, want.state, TOLERANCES["float32"].forward)


@interpreted
def test_16_bit_inputs_cost_only_the_rounding_of_the_output():
    x = gpu_problems.inputs(B=1, T=1, gate=0.2)
    o, state = jax.jit(lambda p: RUN(p, in_place=True))(gpu_problems.problem(x))
    want = expected(x, cotangents_for(x))
    assert o.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    assert relative_rms(np.asarray(o, np.float32), want.o) <= 3e-3
    assert_close("state", state, want.state, TOLERANCES["float32"].forward)


@interpreted
def test_a_reset_by_the_gate_forgets_exactly():
    x = inputs(gate=0.1)
    x["g"][:] = -np.inf
    first = outputs(x, True)
    second = outputs(x | {"initial_state": 3 * x["initial_state"]}, True)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@interpreted
@BOTH
def test_scan_and_vmap(in_place):
    """A state that is overwritten in a loop is that of one token after another."""
    x = jax.tree.map(lambda y: jnp.stack([y, 0.5 * y]), inputs(gate=0.2, B=1))

    def decode(run, x):
        def body(state, _):
            o, state = run(dataclasses.replace(problem(x), initial_state=state))
            return state, o

        return jax.lax.scan(body, x["initial_state"], None, length=3)

    recurrent = lambda p: dispatch.IMPLEMENTATIONS["recurrent"].algorithm(p, 1)  # noqa: E731
    kernel = functools.partial(RUN, in_place=in_place)
    got, want = (jax.jit(jax.vmap(functools.partial(decode, f)))(x) for f in (kernel, recurrent))
    for a, b in zip(got, want, strict=True):
        assert_close("state, o", a, b, TOLERANCES["float32"].forward)


@interpreted
def test_both_derivatives_are_those_of_the_step():
    x = inputs(B=1, HV=2, gate=0.2)
    run = lambda x: RUN(problem(x), in_place=True)  # noqa: E731
    (do, dstate), want = cotangents_for(x), expected(x)
    _, pull = jax.vjp(run, x)
    got = pull((jnp.asarray(do), jnp.asarray(dstate)))[0]
    for name, gradient in want.gradients.items():
        assert_close(f"d{name}", got[name], gradient, TOLERANCES["float32"].gradient)
    _, (o, state) = jax.jvp(run, (x,), (x,))
    along = sum(float(jnp.sum(got[name] * x[name])) for name in want.gradients)
    assert np.isclose(float(jnp.sum(o * do) + jnp.sum(state * dstate)), along, rtol=1e-4)


@interpreted
@BOTH
def test_inside_shard_map(in_place):
    x = inputs(gate=0.2)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    run = lambda x: RUN(problem(x), in_place=in_place)  # noqa: E731
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))
    for a, b in zip(jax.jit(sharded)(x), outputs(x, in_place), strict=True):
        np.testing.assert_array_equal(a, b)


@interpreted
def test_step_takes_the_kernel_on_a_gpu_alone(monkeypatch):
    """A state that the caller holds is left alone, a traced one is overwritten."""
    x = {name: jnp.asarray(y) for name, y in inputs().items()}
    choose, traced = dispatch.choose_for_one_token, []
    assert choose(problem(x)) is dispatch.IMPLEMENTATIONS["recurrent"].algorithm
    monkeypatch.setattr(dispatch, "_platform", lambda problem: "gpu")
    monkeypatch.setattr(support, "DECODE_BEFORE_JAX", jax.__version_info__)
    assert choose(problem(x)) is dispatch.IMPLEMENTATIONS["recurrent"].algorithm
    monkeypatch.setattr(support, "DECODE_BEFORE_JAX", (99,))
    jax.eval_shape(lambda x: traced.append(choose(problem(x))), x)
    assert traced == [dispatch.ONE_TOKEN_IN_PLACE]
    assert choose(problem(x)) is dispatch.ONE_TOKEN
    narrow = problem(x).with_tokens(q=x["q"][..., :32])
    assert choose(narrow) is dispatch.IMPLEMENTATIONS["recurrent"].algorithm


@interpreted
def test_arrays_on_several_devices_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(dispatch, "_platform", lambda problem: "gpu")
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))):
        chosen = dispatch.choose_for_one_token(problem(inputs()))
    assert chosen is dispatch.IMPLEMENTATIONS["recurrent"].algorithm


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"T": 2}, "takes one token; got 2"), ({"K": 32}, "head sizes"), ({"V": 96}, "head sizes")],
)
def test_reasons_are_named(change, reason):
    p = problem(inputs(**change))
    assert reason in mosaic_gpu.why_not_one_token(p)
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_gpu.one_token(p, in_place=False)


def test_step_under_jit_still_has_its_gradient():
    """Whatever runs it: the state's cotangent of one delta step."""
    x = {name: jnp.asarray(y)[:, 0] for name, y in inputs(B=1).items() if name != "initial_state"}
    state = jnp.asarray(inputs(B=1)["initial_state"])
    loss = jax.jit(lambda s: jnp.sum(step(x["q"], x["k"], x["v"], s, beta=x["beta"])[1]))
    erased = jnp.sum(x["k"], -1, keepdims=True) * x["k"] * x["beta"]
    want = jnp.broadcast_to((1 - erased)[..., None], state.shape)
    assert_close("dstate", jax.grad(loss)(state), want, TOLERANCES["float32"].gradient)
