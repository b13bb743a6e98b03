"""The metric and the assertion that all other tests rest on."""

import numpy as np
import pytest

from tests.tolerances import assert_close, relative_rms

REFERENCE = np.array([[3.0, -4.0], [0.0, 5.0]])


def test_metric_is_the_ratio_of_root_mean_squares():
    error = np.array([[0.3, 0.0], [0.0, -0.4]])
    assert relative_rms(REFERENCE + error, REFERENCE) == pytest.approx(0.5 / np.sqrt(50))


@pytest.mark.parametrize("factor", [1e-200, 1.0, 1e200])
def test_metric_does_not_depend_on_the_scale(factor):
    got = relative_rms(factor * (REFERENCE + 0.1), factor * REFERENCE)
    assert got == pytest.approx(0.2 / np.sqrt(50))


def test_metric_is_absolute_where_the_reference_is_zero():
    assert relative_rms(np.full(7, 0.25), np.zeros(7)) == pytest.approx(0.25)


def test_metric_of_nothing_is_zero():
    assert relative_rms(np.zeros((2, 0)), np.zeros((2, 0))) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_assertion_refuses_what_is_not_finite(bad):
    x = REFERENCE.copy()
    x[1, 0] = bad
    with pytest.raises(AssertionError, match="dk: 1 of 4 elements are not finite"):
        assert_close("dk", x, REFERENCE, 1e30)


def test_assertion_refuses_a_reference_that_is_not_finite():
    with pytest.raises(AssertionError, match="reference is not finite"):
        assert_close("o", np.full(3, np.nan), np.full(3, np.nan), 1.0)


def test_assertion_refuses_another_shape():
    with pytest.raises(AssertionError, match=r"o: \(2,\) vs \(2, 2\)"):
        assert_close("o", np.zeros(2), np.zeros((2, 2)), 1.0)


def test_assertion_names_tensor_error_and_place():
    x = REFERENCE.copy()
    x[0, 1] = -4.5
    with pytest.raises(AssertionError, match=r"final_state: .*7\.07e-02 above 1e-02.*\[0, 1\]"):
        assert_close("final_state", x, REFERENCE, 1e-2)
    assert_close("final_state", x, REFERENCE, 8e-2)
