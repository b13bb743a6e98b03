"""Values that a formula might divide by or take the logarithm of, in every implementation."""

import numpy as np
import pytest

from tests import oracle
from tests.cases import DEGENERATE, IMPLEMENTATIONS, VARIANTS, Shape, degenerate
from tests.checks import assert_matches, run
from tests.oracle import Expected, cotangents_for

SHAPE = Shape(1, 20, 2, 4, 6)


def row(x: Expected, i: int) -> Expected:
    """The results of one row of the batch."""
    gradients = {name: np.asarray(g)[i] for name, g in x.gradients.items()}
    return Expected(np.asarray(x.o)[i], np.asarray(x.state)[i], gradients)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("T", [1, 20])
def test_degenerate_values_and_gradients_are_those_of_the_oracle(variant, implementation, T):
    inputs = degenerate(variant, SHAPE._replace(T=T))
    got, want = run(inputs, implementation), oracle.expected(inputs)
    for i, name in enumerate(DEGENERATE):
        try:
            assert_matches(row(got, i), row(want, i))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", ["delta", "kda"])
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scales_that_are_zero_or_negative(variant, implementation, scale):
    inputs = degenerate(variant, SHAPE)
    want = oracle.expected(inputs, scale=scale)
    assert_matches(run(inputs, implementation, scale=scale), want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_results_whose_cotangent_is_zero(implementation):
    inputs = degenerate("gated_delta", SHAPE)
    do, dstate = cotangents_for(inputs)
    for cotangents in ((do, 0 * dstate), (0 * do, dstate), (0 * do, 0 * dstate)):
        want = oracle.expected(inputs, cotangents)
        assert_matches(run(inputs, implementation, cotangents=cotangents), want)
