"""Options and integer arrays: right values in plain types, wrong ones named."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from deltanet_jax import compat
from deltanet_jax.core import checks

NAN, INF = float("nan"), float("inf")
NO_INTEGERS = [True, np.True_, 1.0, "1", None, [1], np.float32(1), NAN, np.arange(2), b"1"]
NO_NUMBERS = [True, np.False_, "0.5", None, [0.5], 1j, np.arange(2), np.array(True), np.array("1")]


@pytest.mark.parametrize("x", [3, np.int8(3), np.uint64(3), np.array(3), jnp.asarray(3)], ids=repr)
def test_integers_of_all_kinds_become_an_int(x):
    value = checks.whole("n", x, least=1)
    assert type(value) is int
    assert value == 3


@pytest.mark.parametrize("x", NO_INTEGERS, ids=repr)
def test_what_is_no_integer_is_named(x):
    with pytest.raises(ValueError, match="`n` must be a positive integer; got "):
        checks.whole("n", x, least=1)


@pytest.mark.parametrize(
    ("limits", "x", "wanted"),
    [
        ({"least": 1}, 0, "a positive integer"),
        ({"least": 0}, -1, "an integer >= 0"),
        ({"most": 5}, 6, "an integer <= 5"),
        ({"least": 1, "most": 5}, 6, "an integer in [1, 5]"),
        ({}, "5", "an integer"),
    ],
)
def test_a_range_of_integers_is_said(limits, x, wanted):
    with pytest.raises(ValueError, match=re.escape(f"`n` must be {wanted}; got {x!r}")):
        checks.whole("n", x, **limits)


def test_what_is_too_long_to_print_is_named_by_its_type():
    for x, kind in ((10**5000, "int"), ("x" * 100, "str")):
        with pytest.raises(ValueError, match=f"`n` must be an integer <= 5; got {kind}$"):
            checks.whole("n", x, most=5)


def test_a_symbolic_size_passes_as_it_is():
    (B,) = export.symbolic_shape("B")
    assert checks.axis_size("batch_size", B) is B
    assert checks.axis_size("batch_size", 2) == 2
    with pytest.raises(ValueError, match="`batch_size` must be a positive integer; got 0"):
        checks.axis_size("batch_size", 0)


@pytest.mark.parametrize(
    "x", [0.5, np.float32(0.5), np.array(0.5), jnp.asarray(0.5, jnp.bfloat16)], ids=repr
)
def test_numbers_of_all_kinds_become_a_float(x):
    value = checks.number("x", x)
    assert type(value) is float
    assert value == 0.5
    assert checks.number("x", 2) == 2.0


@pytest.mark.parametrize("x", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_named(x):
    with pytest.raises(ValueError, match="`x` must be a positive number; got "):
        checks.number("x", x, above=0)


@pytest.mark.parametrize("x", [NAN, INF, -INF, np.float32("nan"), 10**400], ids=str)
def test_what_is_not_finite_is_named(x):
    with pytest.raises(ValueError, match="`x` must be finite; got -?(nan|inf)$"):
        checks.number("x", x, least=0)


@pytest.mark.parametrize(
    ("limits", "x", "wanted"),
    [
        ({"above": 0}, 0, "a positive number"),
        ({"above": 1}, 1.0, "a number > 1"),
        ({"least": 0}, -0.1, "a number >= 0"),
        ({"least": 0, "most": 1}, 1.1, "a number in [0, 1]"),
    ],
)
def test_a_range_of_numbers_is_said(limits, x, wanted):
    with pytest.raises(ValueError, match=re.escape(f"`x` must be {wanted}; got {x!r}")):
        checks.number("x", x, **limits)


def test_a_traced_number_is_no_number():
    with pytest.raises(ValueError, match="`x` must be a number; got "):
        jax.jit(lambda x: checks.number("x", x))(0.5)


@pytest.mark.parametrize("x", [0, 1, "yes", None, "True", []], ids=repr)
def test_only_true_and_false_are_flags(x):
    assert checks.flag("f", True) is True
    assert checks.flag("f", np.False_) is False
    with pytest.raises(ValueError, match="`f` must be True or False; got "):
        checks.flag("f", x)


@pytest.mark.parametrize("x", ["c", "", None, 1, ["a"]], ids=repr)
def test_a_name_is_one_of_the_options(x):
    assert checks.choice("gate", "a", ("a", "b")) == "a"
    with pytest.raises(ValueError, match="`gate` must be one of a, b; got "):
        checks.choice("gate", x, ("a", "b"))


def test_what_is_optional_may_be_none():
    assert checks.optional(checks.whole, "n", None, least=1) is None
    assert checks.optional(checks.whole, "n", 4, least=1) == 4
    with pytest.raises(ValueError, match="`n` must be a positive integer"):
        checks.optional(checks.whole, "n", 0, least=1)


TYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("x64", [False, True])
def test_integers_come_in_any_type_and_leave_in_one(dtype, kind, x64):
    with compat.enable_x64(x64):
        x = kind(np.asarray([100, 27], dtype))
        got = checks.integers("lengths", x, "[N]", least=0)
        assert got.dtype == (jnp.int64 if x64 else jnp.int32)
        assert jnp.sum(got) == 127
        traced = jax.eval_shape(lambda x: checks.integers("lengths", x, "[N]"), x)
        assert traced.dtype == got.dtype


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1, 2], "`n` must be an integer array [N]; got list"),
        (np.ones(2), "`n` must have an integer dtype; got float64"),
        (np.ones(2, bool), "`n` must have an integer dtype; got bool"),
        (np.ones((2, 1), int), "`n` must have shape [N]; got (2, 1)"),
        (np.asarray([0, -1]), "`n` must be >= 0; got -1"),
        (np.asarray([2**31]), "`n` must fit into int32; got 2147483648"),
    ],
)
def test_arrays_that_do_not_fit_are_named(x, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checks.integers("n", x, "[N]", least=0)


def test_known_values_are_read_by_an_explicit_transfer():
    with jax.transfer_guard("disallow"):
        np.testing.assert_array_equal(checks.known(jax.device_put(np.arange(3))), [0, 1, 2])
