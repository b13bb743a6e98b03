"""Head sizes that no tile likes."""

import pytest

from tests.cases import IMPLEMENTATIONS, Shape, layer_like
from tests.checks import assert_matches, run
from tests.oracle import expected

SIZES = [(1, 1), (1, 192), (8, 40), (24, 1), (96, 192), (160, 40)]
ALL_OF = pytest.mark.parametrize(("K", "V"), SIZES, ids=[f"K{K}-V{V}" for K, V in SIZES])


@ALL_OF
def test_the_default_is_right_for_odd_head_sizes(K: int, V: int) -> None:
    inputs = layer_like("kda", Shape(1, 21, 1, K, V))
    assert_matches(run(inputs, "chunkwise", implementation=None), expected(inputs))


@pytest.mark.parametrize(("K", "V"), [(1, 40), (160, 1)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_algorithm_is_right_for_extreme_head_sizes(
    implementation: str, K: int, V: int
) -> None:
    inputs = layer_like("gated_delta", Shape(1, 21, 1, K, V))
    assert_matches(run(inputs, implementation), expected(inputs))
