"""Fixtures of the tests of kernels."""

import pytest

from deltanet_jax.kernels.mosaic_gpu import fused


@pytest.fixture
def fused_launches(monkeypatch) -> list:
    """The arguments of every launch of the forward in one kernel during a test."""
    launch, launches = fused.launch, []

    def spy(*arguments, **options):
        launches.append(arguments)
        return launch(*arguments, **options)

    monkeypatch.setattr(fused, "launch", spy)
    return launches
