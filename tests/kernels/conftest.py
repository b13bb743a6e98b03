"""Fixtures of the tests of kernels."""

import pytest

from deltanet_jax.kernels.mosaic_gpu import run_states_fused


@pytest.fixture
def fused_launches(monkeypatch) -> list:
    """The arguments of every launch of the forward in one kernel during a test."""
    launch, launches = run_states_fused.launch, []

    def spy(*arguments, **options):
        launches.append(arguments)
        return launch(*arguments, **options)

    monkeypatch.setattr(run_states_fused, "launch", spy)
    return launches
