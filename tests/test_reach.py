"""Test which tests `make check` runs for a change."""

import pytest

from tests.reach import ALWAYS, ROOT, reached


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ([], []),
        (["README.md", "LICENSE"], []),
        (["tests/core/test_decay.py"], ["tests/core/test_decay.py"]),
        (["tests/core/test_of_old.py", "tests/test_smoke.py"], []),
        (["tests/parity/test_operators.py", "tests/parity/torch_side.py"], []),
        (["docs/gpu.md"], ["tests/docs"]),
    ],
)
def test_a_change_reaches_its_own_tests(changed, wanted):
    assert reached(changed) == ALWAYS + wanted


@pytest.mark.parametrize(
    ("changed", "some"),
    [
        ("deltanet_jax/core/decay.py", {"tests/core"}),
        ("deltanet_jax/kernels/mosaic_gpu/decode.py", {"tests/kernels"}),
        ("experiments/sweep.py", {"tests/experiments"}),
        # Tests outside of the package that import the module.
        ("deltanet_jax/core/reference.py", {"tests/core", "tests/test_oracle.py"}),
        # A module of no folder, and helpers of tests.
        ("deltanet_jax/compat.py", {"tests/docs/test_formulas.py"}),
        ("tests/kernels/gpu_problems.py", {"tests/kernels/test_mosaic_gpu.py"}),
        ("tests/oracle.py", {"tests/test_oracle.py"}),
        ("tests/kernels/conftest.py", {"tests/kernels"}),
        ("tests/release.py", set()),
    ],
)
def test_a_change_reaches_the_tests_that_use_it(changed, some):
    assert (ROOT / changed).exists()
    assert some <= set(reached([changed]))


def test_both_halves_of_a_change_are_reached_once():
    both = reached(["tests/core/test_decay.py", "deltanet_jax/core/decay.py"])
    assert both == reached(["deltanet_jax/core/decay.py"])
