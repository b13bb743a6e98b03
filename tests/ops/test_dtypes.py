"""The dtype contract: 16 bits in and out, float32 between, float64 under x64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import compat, linear_attention
from tests.cases import IMPLEMENTATIONS, Inputs, Shape, correlated, layer_like, pairs, weak_decay
from tests.checks import assert_matches, cast, run
from tests.oracle import Expected, cotangents_for, expected
from tests.tolerances import TOLERANCES, assert_close

SHAPE = Shape(1, 70, 2, 16, 24)
ALL = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def _rounded(inputs: Inputs, dtype: str) -> tuple[dict, Expected]:
    """Inputs in 16 bits, and the oracle on the very numbers that they hold."""
    low = cast(inputs, dtype)
    cotangents = cotangents_for(inputs)
    exact = {n: np.asarray(x, np.float64) for n, x in low.items()}
    do = np.asarray(jnp.asarray(cotangents[0], dtype), np.float64)
    return low, expected(exact, (do, cotangents[1]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("variant", "implementation"), pairs(("delta", "kda")))
def test_16_bit_inputs(variant: str, implementation: str, dtype: str) -> None:
    """Outputs in 16 bits, state in float32, every cotangent in the dtype of its input."""
    if dtype == "float16" and variant == "kda":
        pytest.skip("one variant is enough for the second 16-bit format")
    inputs, want = _rounded(layer_like(variant, SHAPE), dtype)
    got = run(inputs, implementation)
    assert got.o.dtype == dtype
    assert got.state.dtype == jnp.float32
    assert {n: x.dtype for n, x in got.gradients.items()} == {n: x.dtype for n, x in inputs.items()}
    assert_matches(got, want, dtype)


@ALL
def test_the_state_is_not_kept_in_16_bits(implementation: str) -> None:
    """Weak decay over 300 tokens: a state rounded at each token or chunk loses its digits.

    The keys, values and so on are exact in bfloat16, and nothing is written (beta = 0), so the
    state must be right to float32.
    """
    inputs = weak_decay("gated_delta", Shape(1, 300, 1, 8, 8))
    inputs["beta"] = np.zeros_like(inputs["beta"])
    low = cast(inputs, "bfloat16")
    _, state = linear_attention(**low, **IMPLEMENTATIONS[implementation])
    decay = np.exp(inputs["g"].astype(np.float64).sum(1))
    want = decay[..., None, None] * inputs["initial_state"]
    assert_close("state", state, want, TOLERANCES["float32"].forward)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_initial_state_of_any_float_dtype(dtype: str) -> None:
    inputs, cotangents = layer_like("delta", SHAPE), cotangents_for(layer_like("delta", SHAPE))
    inputs["initial_state"] = jnp.asarray(inputs["initial_state"], dtype)
    got = run(inputs, "chunkwise")
    assert got.gradients["initial_state"].dtype == dtype
    exact = {n: np.asarray(x, np.float64) for n, x in inputs.items()}
    want = expected(exact, cotangents)
    assert_close("o", got.o, want.o, TOLERANCES["float32"].forward)
    assert_close("state", got.state, want.state, TOLERANCES["float32"].forward)


@pytest.mark.parametrize("names", [("q", "k"), ("v",), ("g", "beta"), ("q", "v", "g")])
def test_mixed_dtypes_keep_each_cotangent_in_its_own(names: tuple[str, ...]) -> None:
    inputs = cast(layer_like("kda", Shape(1, 40, 2, 8, 12)), "bfloat16", names)
    got = run(inputs, "chunkwise")
    assert got.o.dtype == inputs["v"].dtype
    assert got.state.dtype == jnp.float32
    for name, x in inputs.items():
        assert got.gradients[name].dtype == x.dtype, name
    exact = {n: np.asarray(x, np.float64) for n, x in inputs.items()}
    want = expected(exact)
    assert_close("state", got.state, want.state, TOLERANCES["bfloat16"].forward)
    assert_close("o", got.o, want.o, TOLERANCES["bfloat16"].forward)


@pytest.mark.parametrize(("variant", "implementation"), pairs(("gla", "gated_delta")))
def test_float64_is_computed_in_float64(variant: str, implementation: str) -> None:
    inputs = {n: x.astype(np.float64) for n, x in correlated(variant, SHAPE).items()}
    want = expected(inputs)
    with compat.enable_x64():
        got = run(inputs, implementation)
        assert got.o.dtype == got.state.dtype == jnp.float64
        assert all(x.dtype == jnp.float64 for x in got.gradients.values())
    assert_close("o", got.o, want.o, TOLERANCES["float64"].forward)
    assert_close("state", got.state, want.state, TOLERANCES["float64"].forward)
    for name, gradient in want.gradients.items():
        assert_close(f"d{name}", got.gradients[name], gradient, TOLERANCES["float64"].gradient)


@ALL
def test_float32_stays_float32_under_x64(implementation: str) -> None:
    """No constant may promote: not in the program, not in its results."""
    inputs = layer_like("kda", Shape(1, 70, 1, 8, 12)) | {
        "segment_ids": np.repeat([0, 1], 35)[None].astype(np.int32)
    }
    with compat.enable_x64():
        arrays = {n: jnp.asarray(x) for n, x in inputs.items()}
        call = lambda x: linear_attention(**x, **IMPLEMENTATIONS[implementation])  # noqa: E731
        program = jax.make_jaxpr(call)(arrays)
        o, state = jax.eval_shape(call, arrays)
    assert o.dtype == state.dtype == jnp.float32
    assert "f64" not in str(program)


@ALL
def test_float32_programs_ask_for_full_precision(implementation: str) -> None:
    """On hardware with reduced-precision matrix units, HIGHEST is what float32 means."""
    inputs = layer_like("kda", Shape(1, 70, 1, 8, 12))

    def precisions(**options: object) -> set[str]:
        call = lambda x: linear_attention(**x, **options)  # noqa: E731
        text = jax.jit(call).lower(inputs).as_text()
        lines = [line for line in text.splitlines() if "dot_general" in line]
        return {p for line in lines for p in ("HIGHEST", "DEFAULT", "HIGH,") if p in line}

    options = IMPLEMENTATIONS[implementation]
    assert precisions(**options) <= {"HIGHEST"}
    if implementation != "recurrent":
        assert "DEFAULT" in precisions(**options, precision="default")


def test_numpy_arrays_are_arrays() -> None:
    inputs = layer_like("delta", Shape(1, 20, 1, 8, 12))
    o, _ = linear_attention(**inputs)
    same, _ = linear_attention(**{n: jnp.asarray(x) for n, x in inputs.items()})
    np.testing.assert_array_equal(o, same)
