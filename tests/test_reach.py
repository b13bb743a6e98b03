"""Test which tests `make check` runs for a change."""

import pytest

from tests.reach import ALWAYS, reached


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ([], []),
        (["README.md", "LICENSE"], []),
        (["deltanet_jax/core/decay.py"], ["tests/core"]),
        (["deltanet_jax/kernels/mosaic_gpu/decode.py"], ["tests/kernels"]),
        (["tests/core/test_decay.py"], ["tests/core/test_decay.py"]),
        (["tests/core/test_decay.py", "deltanet_jax/core/decay.py"], ["tests/core"]),
        (["tests/core/test_of_old.py", "tests/test_smoke.py"], []),
        (["experiments/sweep.py", "docs/gpu.md"], ["tests/docs", "tests/experiments"]),
    ],
)
def test_a_change_reaches_the_tests_of_its_packages(changed, wanted):
    assert reached(changed) == ALWAYS + wanted
