"""The decoding kernel on the device: `pytest -m gpu tests/kernels`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import step
from tests.kernels import gpu_problems
from tests.kernels.test_one_token import inputs
from tests.oracle import cotangents_for, expected
from tests.tolerances import TOLERANCES, assert_close

pytestmark = pytest.mark.gpu

CASES = {
    "delta": {"B": 1, "H": 2, "HV": 2, "K": 128, "V": 128},
    "gated-delta": {"B": 64, "H": 4, "HV": 4, "K": 128, "V": 128, "gate": 5.0},
    "kda": {"B": 3, "H": 2, "HV": 2, "K": 128, "V": 128, "channels": True},
    "grouped": {"B": 5, "H": 1, "HV": 3, "K": 64, "V": 256, "gate": 0.2},
    "wide": {"B": 40, "H": 2, "HV": 2, "K": 256, "V": 64, "gate": 0.2},
    "linear": {"B": 2, "K": 256, "V": 256, "delta": False},
}


def _step(x, state, dtype):
    q, k, v = (jnp.asarray(x[name][:, 0], dtype) for name in "qkv")
    g, beta = (None if x.get(n) is None else jnp.asarray(x[n][:, 0]) for n in ("g", "beta"))
    return step(q, k, v, state, g=g, beta=beta)


@pytest.mark.parametrize("name", CASES)
def test_step_equals_the_recurrence(name):
    x = inputs(**CASES[name])
    want = expected(x, cotangents_for(x))
    held = jnp.asarray(x["initial_state"])
    for run in (_step, jax.jit(_step, static_argnums=2)):
        o, state = run(x, held, "float32")
        assert_close("o", o[:, None], want.o, TOLERANCES["float32"].forward)
        assert_close("state", state, want.state, TOLERANCES["float32"].forward)
    np.testing.assert_array_equal(held, x["initial_state"])


@pytest.mark.parametrize("name", ["gated-delta", "kda"])
def test_a_scan_in_place_equals_one_step_after_another(name):
    x = inputs(**CASES[name])

    @jax.jit
    def decode(state):
        return jax.lax.scan(lambda s, _: _step(x, s, "bfloat16")[::-1], state, length=5)

    state = jnp.asarray(x["initial_state"])
    last, outputs = decode(state)
    for o in outputs:
        expected_o, state = _step(x, state, "bfloat16")
        np.testing.assert_array_equal(np.asarray(o, "f4"), np.asarray(expected_o, "f4"))
    np.testing.assert_array_equal(last, state)


def test_gradients_are_those_of_the_oracle():
    x = gpu_problems.inputs(T=1, H=2, HV=2, K=128, V=128, gate=0.2, dtype="float32")
    state = jnp.asarray(x["initial_state"])
    do, dstate = (jnp.asarray(y) for y in cotangents_for(x))
    _, pull = jax.vjp(lambda s: _step(x, s, "float32"), state)
    want = expected(x).gradients["initial_state"]
    assert_close("dstate", pull((do[:, 0], dstate))[0], want, TOLERANCES["float32"].gradient)
