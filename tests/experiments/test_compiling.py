"""How the experiments have programs compiled."""

import os

import jax
import jax.numpy as jnp
import pytest

from experiments.compiling import compile_ahead, cpu_optimization, prefer_quick_compilation

AUTOTUNE, TRITON = "--xla_gpu_autotune_level", "--xla_gpu_enable_triton_gemm"


@pytest.mark.parametrize("given", [None, "--xla_dump_to=/nowhere", f"{AUTOTUNE}=4"])
def test_what_the_user_asks_of_xla_stays(monkeypatch, given):
    if given is None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    else:
        monkeypatch.setenv("XLA_FLAGS", given)
    prefer_quick_compilation()
    flags = os.environ["XLA_FLAGS"].split()
    assert given is None or flags[0] == given
    values = dict(flag.split("=") for flag in flags)
    assert values[TRITON] == "false"
    assert values[AUTOTUNE] == ("4" if given == f"{AUTOTUNE}=4" else "0")


@pytest.mark.parametrize("level", [None, 0, 1])
def test_levels_of_optimisation_are_taken(level):
    options = cpu_optimization(level)
    assert (options is None) == (level is None or jax.default_backend() != "cpu")
    program = compile_ahead(jnp.sin, jnp.ones(3), compiler_options=options).program
    assert program(jnp.zeros(3)).tolist() == [0, 0, 0]


def test_a_level_that_xla_does_not_know_is_its_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="optimization_level"):
        compile_ahead(jnp.sin, 1.0, compiler_options={"xla_backend_optimization_level": "x"})
