"""Properties of the cache of compiled programs that conftest.py sets."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture
def entries() -> Iterator[list[Path]]:
    """The files of one program in the cache, after it was compiled; they are removed at the end."""
    shortest = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    pattern = f"jit_{program.__name__}-*"
    folder = Path(jax.config.jax_compilation_cache_dir)
    try:
        for old in folder.glob(pattern):
            old.unlink(missing_ok=True)
        jax.clear_caches()
        jax.jit(program)(jnp.ones(3)).block_until_ready()
        yield sorted(folder.glob(pattern))
    finally:
        for left in folder.glob(pattern):
            left.unlink(missing_ok=True)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)


def program(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


program.__name__ = f"program_{os.getpid()}"  # the entries are of this worker alone


@pytest.mark.parametrize("kept", [0, 0.5], ids=["empty", "half"])
def test_a_torn_entry_is_compiled_again(entries, kept):
    # JAX writes entries in place: another worker may read half of one, and a killed run leaves it.
    assert entries
    for entry in entries:
        whole = entry.read_bytes()
        entry.write_bytes(whole[: int(kept * len(whole))])
    jax.clear_caches()
    assert jnp.allclose(jax.jit(program)(jnp.ones(3)), jnp.sin(1.0))


def test_processes_that_tests_start_use_the_same_cache():
    code = "import jax; print(jax.config.jax_compilation_cache_dir)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == jax.config.jax_compilation_cache_dir
