"""A sequence cut anywhere and continued from its state is the whole sequence."""

import functools

import jax
import numpy as np
import pytest

from deltanet_jax import linear_attention, step
from deltanet_jax.ops.chunkwise import chunkwise
from tests.cases import IMPLEMENTATIONS, LONG, VARIANTS, Inputs, Shape, layer_like, pairs, rng_for
from tests.checks import assert_matches, run
from tests.oracle import expected
from tests.tolerances import TOLERANCES, assert_close

SHAPE = Shape(2, 130, 2, 8, 12)
CUTS = (1, 63, 64, 65, 129)
FORWARD, GRADIENT = TOLERANCES["float32"]
PER_TOKEN = ("q", "k", "v", "g", "beta")


def _piece(inputs: Inputs, start: int, stop: int) -> Inputs:
    return {n: x[:, start:stop] if n in PER_TOKEN else x for n, x in inputs.items()}


def _in_two(inputs: Inputs, cut: int, options: dict) -> tuple[jax.Array, jax.Array]:
    first, state = linear_attention(**_piece(inputs, 0, cut), **options)
    rest = _piece(inputs, cut, SHAPE.T) | {"initial_state": state}
    second, state = linear_attention(**rest, **options)
    return jax.numpy.concatenate([first, second], axis=1), state


@functools.cache
def _whole(variant: str) -> tuple[Inputs, object]:
    inputs = layer_like(variant, SHAPE)
    return inputs, expected(inputs)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_state_continues_across_a_cut(implementation: str, cut: int) -> None:
    variant = "kda" if cut % 2 else "delta"
    inputs, want = _whole(variant)
    o, state = _in_two(inputs, cut, IMPLEMENTATIONS[implementation])
    assert_close("o", o, want.o, FORWARD)
    assert_close("state", state, want.state, FORWARD)


@pytest.mark.parametrize("variant", ["linear", "gated_delta"])
@pytest.mark.parametrize("implementation", LONG)
def test_gradients_flow_across_a_cut(variant: str, implementation: str) -> None:
    inputs, want = _whole(variant)
    rng = rng_for("cotangents", *inputs["v"].shape[:3], SHAPE.K, SHAPE.V)
    do = rng.standard_normal(want.o.shape).astype(np.float32)
    dstate = rng.standard_normal(want.state.shape).astype(np.float32)

    @jax.jit
    def gradients(inputs: Inputs) -> Inputs:
        call = lambda x: _in_two(x, 70, IMPLEMENTATIONS[implementation])  # noqa: E731
        return jax.vjp(call, inputs)[1]((do, dstate))[0]

    got = gradients(inputs)
    for name, gradient in want.gradients.items():
        assert_close(f"d{name}", got[name], gradient, GRADIENT)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_token_by_token_equals_the_whole(variant: str) -> None:
    inputs, want = _whole(variant)
    decode = jax.jit(step)
    state, rows = inputs["initial_state"], []
    for t in range(SHAPE.T):
        token = {n: x[:, t] for n, x in inputs.items() if n in PER_TOKEN}
        o, state = decode(state=state, **token)
        rows.append(o)
    assert_close("o", np.stack(rows, axis=1), want.o, FORWARD)
    assert_close("state", state, want.state, FORWARD)


@pytest.mark.parametrize(("variant", "implementation"), pairs(("gla", "gated_delta")))
def test_decoding_continues_a_prefill(variant: str, implementation: str) -> None:
    inputs, want = _whole(variant)
    prefill, decode = 67, jax.jit(step)
    _, state = linear_attention(**_piece(inputs, 0, prefill), **IMPLEMENTATIONS[implementation])
    for t in range(prefill, prefill + 5):
        token = {n: x[:, t] for n, x in inputs.items() if n in PER_TOKEN}
        o, state = decode(state=state, **token)
        assert_close(f"o[{t}]", o, want.o[:, t], FORWARD)


def test_step_reads_value_heads_of_a_group_and_scales() -> None:
    shape = Shape(2, 1, 2, 4, 6, group=3)
    inputs = layer_like("kda", shape)
    want = expected(inputs, scale=0.3)
    token = {n: x[:, 0] for n, x in inputs.items() if n in PER_TOKEN}
    o, state = step(**token, state=inputs["initial_state"], scale=0.3)
    assert_close("o", o, want.o[:, 0], FORWARD)
    assert_close("state", state, want.state, FORWARD)


def test_step_keeps_its_state_in_float32_and_its_output_in_the_dtype_of_v() -> None:
    inputs = layer_like("delta", Shape(1, 1, 1, 4, 6))
    token = {n: jax.numpy.asarray(x[:, 0], "bfloat16") for n, x in inputs.items() if n in "qkv"}
    beta, state = inputs["beta"][:, 0], jax.numpy.asarray(inputs["initial_state"], "bfloat16")
    o, state = step(**token, state=state, beta=beta)
    assert o.dtype == jax.numpy.bfloat16
    assert state.dtype == jax.numpy.float32


@pytest.mark.parametrize("prepared", [8 * 600, 2**20], ids=["segments of 600", "whole"])
@pytest.mark.parametrize("variant", ["kda", "gla"])
def test_form_2_prepares_as_much_as_memory_is_given_for(variant: str, prepared: int) -> None:
    inputs = layer_like(variant, Shape(1, 1100, 1, 4, 4))
    algorithm = functools.partial(chunkwise, prepared=prepared)
    assert_matches(run(inputs, "chunkwise", implementation=algorithm), expected(inputs))
