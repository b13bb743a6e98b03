"""Every implementation of every variant equals the float64 recurrence, gradients included."""

import pytest

from tests.cases import Shape, grid
from tests.checks import assert_matches, run
from tests.oracle import expected_of_case


@pytest.mark.parametrize(("variant", "implementation", "shape", "family"), grid())
def test_implementation_equals_the_recurrence(
    variant: str, implementation: str, shape: Shape, family: str
) -> None:
    inputs, want = expected_of_case(variant, shape, family)
    assert_matches(run(inputs, implementation), want)
