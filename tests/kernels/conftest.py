"""Fixtures of the tests of kernels."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

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


@pytest.fixture(autouse=True)
def no_cache_of_programs_for_other_chips(request) -> Iterator[None]:
    """Keep programs for described devices out of the cache: it cannot load them without one."""
    if not request.module.__name__.endswith("_compile"):
        yield
        return
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
