"""Numbers that break other implementations: none may turn into NaN, or into wrong digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltanet_jax as d
from deltanet_jax.core import reference
from tests import oracle
from tests.cases import CHUNKED, IMPLEMENTATIONS, PORTABLE, unit
from tests.checks import assert_matches, run
from tests.tolerances import TOLERANCES, assert_close

B, T, H, K, V = 1, 37, 2, 6, 5


def draw(seed, **change):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, B, T, H, K))
    inputs = {
        "q": q,
        "k": unit(k),
        "v": rng.standard_normal((B, T, H, V)),
        "beta": rng.uniform(0, 2, (B, T, H)),
        "initial_state": rng.standard_normal((B, H, K, V)),
    }
    return {n: np.asarray(x, np.float32) for n, x in (inputs | change).items()}


ROWS = {
    "zero-keys": {"k": np.zeros((B, T, H, K))},
    "zero-queries": {"q": np.zeros((B, T, H, K))},
    "zero-values": {"v": np.zeros((B, T, H, V))},
    "zero-beta": {"beta": np.zeros((B, T, H))},
    "identical-keys": {"k": np.broadcast_to(unit(np.ones(K)), (B, T, H, K))},
    "identical-keys-reflected": {
        "k": np.broadcast_to(unit(np.ones(K)), (B, T, H, K)),
        "beta": np.full((B, T, H), 2.0),
    },
    "everything-forgotten": {"g": np.full((B, T, H), -np.inf)},
    "every-channel-forgotten": {"g": np.full((B, T, H, K), -np.inf)},
    "huge-gates": {"g": np.full((B, T, H, K), -1e30)},
    "strong-gates": {"g": np.full((B, T, H), -20.0)},
    "strong-vector-gates": {"g": np.full((B, T, H, K), -20.0)},
    "reset-amid-weak-gates": {
        "g": np.where(np.arange(T)[:, None] % 9 == 4, -np.inf, -0.01) * np.ones((B, 1, H))
    },
    "reset-of-half-the-channels": {
        "g": np.where(
            (np.arange(T)[:, None, None] % 9 == 4) & (np.arange(K) < K // 2), -np.inf, -0.01
        )
        * np.ones((B, 1, H, 1))
    },
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", ROWS)
def test_degenerate_rows_keep_outputs_states_and_gradients_exact(rows, implementation):
    inputs = draw(1, **ROWS[rows])
    got = run(inputs, implementation, chunk_size=16 if implementation in CHUNKED else None)
    assert_matches(got, oracle.expected(inputs))


@pytest.mark.parametrize("implementation", CHUNKED)
@given(seed=st.integers(0, 2**16), scale=st.floats(1e-3, 1e3), decay=st.floats(0, 30))
def test_random_values_equal_the_recurrence(implementation, seed, scale, decay):
    rng = np.random.default_rng(seed)
    inputs = draw(
        seed,
        v=scale * rng.standard_normal((B, T, H, V)),
        g=-decay * rng.uniform(0, 1, (B, T, H, K)) ** 4,
    )
    o, state = _call(inputs, implementation)
    want_o, want_state = reference.recurrence(**inputs)
    assert_close("o", o, want_o, TOLERANCES["float32"].forward)
    assert_close("final_state", state, want_state, TOLERANCES["float32"].forward)


def _call(inputs, implementation):
    jitted = jax.jit(
        lambda inputs: d.linear_attention(**inputs, implementation=implementation, chunk_size=16)
    )
    return jitted(inputs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_future_tokens_do_not_change_the_past(implementation):
    inputs = draw(2)
    cut = 20
    changed = {
        n: np.concatenate([x[:, :cut], np.full_like(x[:, cut:], 0.7)], axis=1)
        if n != "initial_state"
        else x
        for n, x in inputs.items()
    }
    o, after = (
        d.linear_attention(**x, **IMPLEMENTATIONS[implementation])[0] for x in (inputs, changed)
    )
    np.testing.assert_array_equal(o[:, :cut], after[:, :cut])
    assert np.all(np.any(np.asarray(o[:, cut:] != after[:, cut:]), axis=-1))


@pytest.mark.parametrize("implementation", PORTABLE)
def test_the_normaliser_is_the_sum_of_keys(implementation):
    inputs = draw(3, q=np.random.default_rng(1).random((B, T, H, K)))
    q, k, v = inputs["q"], np.abs(inputs["k"]), inputs["v"]
    o, state = d.normalized_linear_attention(q, k, v, implementation=implementation, eps=1e-3)
    weights = np.einsum("bthk,bshk->bhts", q, k, dtype=np.float64) * K**-0.5
    weights = np.tril(weights)
    want = np.einsum("bhts,bshv->bthv", weights, v) / (
        weights.sum(-1).transpose(0, 2, 1)[..., None] + 1e-3
    )
    assert_close("o", o, want, TOLERANCES["float32"].forward)
    assert state.shape == (B, H, K, V + 1)
    assert_close("z", state[..., -1], k.sum(1), TOLERANCES["float32"].forward)
    assert_close("S", state[..., :-1], np.einsum("bthk,bthv->bhkv", k, v), 1e-5)


def test_the_normalised_form_keeps_the_dtype_of_v_and_continues():
    q = jnp.full((1, 8, 1, 4), 0.5, jnp.bfloat16)
    o, state = d.normalized_linear_attention(q, q, q)
    assert o.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    first, middle = d.normalized_linear_attention(q[:, :3], q[:, :3], q[:, :3])
    second, last = d.normalized_linear_attention(q[:, 3:], q[:, 3:], q[:, 3:], initial_state=middle)
    np.testing.assert_allclose(last, state, rtol=1e-6)
    np.testing.assert_allclose(
        np.float32(jnp.concatenate([first, second], 1)), np.float32(o), rtol=1e-2
    )
