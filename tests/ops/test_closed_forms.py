"""Cases whose answer is known without any oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import delta_rule, linear_attention
from tests.cases import IMPLEMENTATIONS, Shape, layer_like, pairs, rng_for
from tests.tolerances import TOLERANCES, assert_close

ALL = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
FORWARD = TOLERANCES["float32"].forward


@ALL
def test_writing_a_key_again_replaces_its_value(implementation: str) -> None:
    """Write (k1, v1), (k2, v2), (k1, v3); read k1, then k2. A plain sum reads v1 + v3."""
    rng = rng_for("overwrite")
    k1, k2 = np.linalg.qr(rng.standard_normal((8, 8)))[0][:2]
    v1, v2, v3 = rng.standard_normal((3, 5))
    zero = np.zeros(5)
    k = np.stack([k1, k2, k1, k1, k2])[None, :, None].astype(np.float32)
    v = np.stack([v1, v2, v3, zero, zero])[None, :, None].astype(np.float32)
    beta = np.array([1, 1, 1, 0, 0], np.float32)[None, :, None]
    options = IMPLEMENTATIONS[implementation]
    o, _ = linear_attention(k, k, v, beta=beta, scale=1.0, **options)
    np.testing.assert_allclose(o[0, 3:, 0], [v3, v2], atol=1e-6)
    o, _ = linear_attention(k, k, v, scale=1.0, **options)
    np.testing.assert_allclose(o[0, 3:, 0], [v1 + v3, v2], atol=1e-6)


@ALL
def test_state_flips_sign_at_every_token(implementation: str) -> None:
    """K = 1, k = 1, beta = 2, v = 0, S_0 = 1: `S_t = (-1)^t` exactly, over several chunks."""
    ones = np.ones((1, 257, 1, 1), np.float32)
    o, state = linear_attention(
        ones,
        ones,
        0 * ones,
        beta=2 * ones[..., 0],
        scale=1.0,
        initial_state=np.ones((1, 1, 1, 1), np.float32),
        **IMPLEMENTATIONS[implementation],
    )
    np.testing.assert_array_equal(o.ravel(), (-1.0) ** np.arange(1, 258))
    assert state.item() == -1.0


@pytest.mark.parametrize("gate", ["none", "zero", "zero_vector"])
@ALL
def test_beta_zero_leaves_the_state_bit_equal(implementation: str, gate: str) -> None:
    inputs = layer_like("delta", Shape(2, 70, 2, 8, 12))
    inputs["beta"] = np.zeros_like(inputs["beta"])
    if gate != "none":
        inputs["g"] = np.zeros((2, 70, 2, 8) if gate == "zero_vector" else (2, 70, 2), np.float32)
    o, state = linear_attention(**inputs, scale=1.0, **IMPLEMENTATIONS[implementation])
    np.testing.assert_array_equal(state, inputs["initial_state"])
    want = np.einsum("bthk,bhkv->bthv", inputs["q"], inputs["initial_state"])
    assert_close("o", o, want, FORWARD)


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize(("variant", "implementation"), pairs(("linear", "delta")))
def test_zero_gates_are_no_gates(variant: str, implementation: str, vector: bool) -> None:
    inputs = layer_like(variant, Shape(1, 70, 2, 8, 12))
    g = np.zeros((1, 70, 2, 8) if vector else (1, 70, 2), np.float32)
    options = IMPLEMENTATIONS[implementation]
    plain, gated = linear_attention(**inputs, **options), linear_attention(**inputs, g=g, **options)
    for name, x, y in zip(("o", "state"), gated, plain, strict=True):
        assert_close(name, x, y, FORWARD)


@pytest.mark.parametrize(("variant", "implementation"), pairs(("scalar_gla", "gated_delta")))
def test_equal_channels_make_a_vector_gate_scalar(variant: str, implementation: str) -> None:
    inputs = layer_like(variant, Shape(1, 70, 2, 8, 12))
    options = IMPLEMENTATIONS[implementation]
    scalar = linear_attention(**inputs, **options)
    vector = linear_attention(
        **inputs | {"g": np.repeat(inputs["g"][..., None], 8, axis=-1)}, **options
    )
    for name, x, y in zip(("o", "state"), vector, scalar, strict=True):
        assert_close(name, x, y, FORWARD)


@ALL
def test_trailing_no_op_tokens_change_nothing(implementation: str) -> None:
    """Padding after the gate is computed: k = v = beta = 0 and g = 0."""
    inputs = layer_like("kda", Shape(1, 50, 2, 8, 12))
    options = IMPLEMENTATIONS[implementation]
    padded = {
        n: x if n == "initial_state" else np.pad(x, [(0, 0), (0, 20)] + [(0, 0)] * (x.ndim - 2))
        for n, x in inputs.items()
    }
    o, state = linear_attention(**inputs, **options)
    padded_o, padded_state = linear_attention(**padded, **options)
    assert_close("o", padded_o[:, :50], o, FORWARD)
    assert_close("state", padded_state, state, FORWARD)


def test_one_step_is_one_step_of_gradient_descent() -> None:
    """On `1/2 |k S - v|^2` at learning rate beta, the gradient taken by JAX."""
    inputs = layer_like("delta", Shape(2, 1, 3, 8, 12))
    inputs["k"] = 1.7 * inputs["k"]  # the identity needs no unit keys

    def loss(S: jax.Array) -> jax.Array:
        read = jnp.einsum("bhk,bhkv->bhv", inputs["k"][:, 0], S, precision="highest")
        return 0.5 * jnp.sum((read - inputs["v"][:, 0]) ** 2)

    S = jnp.asarray(inputs["initial_state"])
    want = S - inputs["beta"][:, 0, :, None, None] * jax.grad(loss)(S)
    for options in IMPLEMENTATIONS.values():
        _, state = delta_rule(**inputs, **options)
        assert_close("state", state, want, 1e-6)


@ALL
def test_scale_multiplies_the_output_once_and_the_state_never(implementation: str) -> None:
    inputs = layer_like("gated_delta", Shape(1, 40, 2, 16, 12))
    options = IMPLEMENTATIONS[implementation]
    default, state = linear_attention(**inputs, **options)
    one, state_one = linear_attention(**inputs, scale=1.0, **options)
    assert_close("o", default, np.asarray(one) / 4, FORWARD)
    np.testing.assert_array_equal(state, state_one)
    zero, _ = linear_attention(**inputs, scale=0.0, **options)
    assert not np.any(zero)


@pytest.mark.parametrize(("variant", "implementation"), pairs(("linear", "kda")))
def test_outputs_are_linear_in_values_and_state(variant: str, implementation: str) -> None:
    inputs = layer_like(variant, Shape(1, 40, 2, 8, 12))
    options = IMPLEMENTATIONS[implementation]
    o, state = linear_attention(**inputs, **options)
    tripled = inputs | {n: -3 * inputs[n] for n in ("v", "initial_state")}
    o3, state3 = linear_attention(**tripled, **options)
    assert_close("o", o3, -3 * np.asarray(o), FORWARD)
    assert_close("state", state3, -3 * np.asarray(state), FORWARD)
