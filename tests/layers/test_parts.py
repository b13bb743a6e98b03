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
from deltanet_jax.layers.gates import log_decay


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


@pytest.mark.parametrize("largest", [1e19, 3e38])
@pytest.mark.parametrize("name", [name for name in norms.NORMS if name != "none"])
def test_norms_of_large_rows_neither_overflow_nor_vanish(name, largest):
    x = jnp.asarray([[largest, -largest / 2, 0.0]])
    small = jnp.asarray([[1.0, -0.5, 0.0]])
    norm = norms.NORMS[name]
    np.testing.assert_allclose(norm(x), norm(small), rtol=1e-4)
    gradient = jax.grad(lambda x: jnp.sum(norm(x) * jnp.asarray([1.0, 2.0, 3.0])))(x)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("largest", [1e19, 3e38])
def test_rms_norm_of_large_rows_neither_overflows_nor_vanishes(largest):
    x, layer = jnp.asarray([[largest, -largest / 2, 0.0]]), norms.RMSNorm(3)
    np.testing.assert_allclose(layer(x), layer(jnp.asarray([[1e3, -5e2, 0.0]])), rtol=1e-4)
    assert np.isfinite(jax.grad(lambda x: jnp.sum(layer(x)[:, 0]))(x)).all()


@pytest.mark.parametrize("A_log", [89.0, 1e4, np.inf])
@pytest.mark.parametrize("x", [-1e4, 0.0, 1e4])
def test_a_decay_of_huge_rates_is_never_nan(A_log, x):
    g = log_decay(jnp.full((1, 1, 1), x), jnp.full((1,), A_log), jnp.zeros((1,)))
    assert g.item() <= 0
