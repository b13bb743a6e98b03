"""The parts of a layer by themselves: norms, feature maps, convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltanet_jax.layers import norms
from deltanet_jax.layers.convolution import causal_convolution, next_inputs
from deltanet_jax.layers.features import FEATURE_MAPS, dpfp, feature_dim


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=6, max_size=6))
def test_norms_keep_direction_and_fix_length(values):
    x = np.asarray(values, np.float32)
    for name, order in [("l2", 2), ("sum", 1)]:
        y = np.asarray(norms.NORMS[name](jnp.asarray(x)))
        size = np.linalg.norm(x.astype(np.float64), order)
        assert np.linalg.norm(y, order) <= 1 + 1e-5
        if size > 0.1:
            np.testing.assert_allclose(y, x / size, atol=1e-4)


@pytest.mark.parametrize("name", norms.NORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_norms_compute_in_float32_and_zero_rows_have_finite_gradients(name, dtype):
    norm = norms.NORMS[name]
    zero = jnp.zeros((2, 5), dtype)
    assert norm(zero).dtype == jnp.float32
    assert np.all(np.asarray(norm(zero)) == 0)
    assert np.all(np.isfinite(np.asarray(jax.grad(lambda x: jnp.sum(norm(x)))(zero))))
    # The squares of these overflow float16.
    large = jnp.full((1, 4), 3e4, dtype)
    assert np.all(np.isfinite(np.asarray(norm(large))))


def test_rms_norm_scales_each_channel():
    norm = norms.RMSNorm(4, eps=1e-12)
    norm.scale[...] = jnp.array([1.0, 2.0, 0.5, -1.0])
    x = np.array([[3.0, -4.0, 0.0, 12.0]], np.float32)
    rms = np.sqrt(np.mean(x**2))
    np.testing.assert_allclose(norm(jnp.asarray(x)), x / rms * [1, 2, 0.5, -1], rtol=1e-6)
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_dpfp_is_the_loop_of_its_definition():
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    for nu in (1, 2, 3):
        r = np.maximum(np.concatenate([x, -x], -1), 0)
        wanted = np.zeros((3, 2 * nu * 4))
        for j in range(nu):
            for i in range(8):
                wanted[:, 8 * j + i] = r[:, i] * r[:, (i - j - 1) % 8]
        np.testing.assert_allclose(dpfp(jnp.asarray(x), nu), wanted, rtol=1e-6)
        assert wanted.shape[-1] == feature_dim("dpfp", 4, nu)


def test_feature_maps_have_their_formulas():
    x = jnp.linspace(-3, 3, 13)
    wanted = {
        "silu": x / (1 + jnp.exp(-x)),
        "relu": jnp.maximum(x, 0),
        "elu": jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0))),
        "identity": x,
    }
    for name, values in wanted.items():
        np.testing.assert_allclose(FEATURE_MAPS[name](x, 1), values, rtol=1e-6, atol=1e-7)
        assert feature_dim(name, 7, 3) == 7
    assert set(FEATURE_MAPS) == {*wanted, "dpfp"}


def test_convolution_is_numpys_per_channel():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 9, 3)), rng.normal(size=(4, 3))
    y = causal_convolution(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32))
    for b in range(2):
        for d in range(3):
            wanted = np.convolve(x[b, :, d], kernel[::-1, d])[:9]
            np.testing.assert_allclose(y[b, :, d], wanted, atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_next_inputs_are_the_last_ones_read(width):
    x = jnp.arange(1.0, 11.0).reshape(2, 5, 1)
    before = -jnp.ones((2, width - 1, 1))
    lengths = jnp.array([1, 5])
    whole = np.concatenate([before, x], axis=1)
    got = np.asarray(next_inputs(x, width, before, lengths))
    for row, n in enumerate([1, 5]):
        np.testing.assert_array_equal(got[row], whole[row, n : n + width - 1])
    np.testing.assert_array_equal(next_inputs(x, width, before), whole[:, 5:])


def test_convolution_does_not_spread_nan_over_a_border():
    x = jnp.ones((1, 6, 2)).at[:, 2].set(jnp.nan)
    runs = jnp.array([[0, 0, 0, 1, 1, 1]])

    def loss(x):
        return jnp.sum(causal_convolution(x, jnp.ones((3, 2)), None, runs)[:, 3:])

    value, dx = jax.value_and_grad(loss)(x)
    assert value == 2 * (1 + 2 + 3)
    assert np.all(np.isfinite(dx))
