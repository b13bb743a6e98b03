"""Programs compiled ahead of their first call, and without long searches."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

__all__ = ["Compiled", "compile_ahead", "cpu_optimization", "prefer_quick_compilation"]

# Products on a GPU by cuBLAS, by its own choice of kernel.
QUICK = {"--xla_gpu_autotune_level": "0", "--xla_gpu_enable_triton_gemm": "false"}

_TRACING = threading.Lock()

Options = dict[str, bool | int | str]


class Compiled(NamedTuple):
    """A program, and how long making it took."""

    program: jax.stages.Compiled
    seconds: float


def prefer_quick_compilation() -> None:
    """Unless XLA_FLAGS says otherwise; before JAX first asks for a device.

    Timing several kernels for every product, XLA takes longer to compile most of these programs
    for a GPU than they run.
    """
    given = os.environ.get("XLA_FLAGS", "")
    missing = [f"{flag}={value}" for flag, value in QUICK.items() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()


def cpu_optimization(level: int | None) -> Options | None:
    """Compiler options for this level of XLA's optimisation where code is made for a CPU."""
    if level is None or jax.default_backend() != "cpu":
        return None
    return {"xla_backend_optimization_level": level}


def compile_ahead(
    function: Callable[..., Any],
    *arguments: Any,
    compiler_options: Options | None = None,
    **jit_options: Any,
) -> Compiled:
    """Compile for arguments of these shapes.

    Threads may: they take turns in tracing, which is Python's and kernels' own work, and
    compile side by side. The seconds are without the wait for the turn.
    """
    with _TRACING:
        begin = time.perf_counter()
        lowered = jax.jit(function, **jit_options).lower(*arguments)
    program = lowered.compile(compiler_options)
    return Compiled(program, time.perf_counter() - begin)
