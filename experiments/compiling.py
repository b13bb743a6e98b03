"""Programs compiled ahead of their first call."""

import threading
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["compile_ahead"]

_TRACING = threading.Lock()


def compile_ahead(
    function: Callable[..., Any],
    *arguments: Any,
    compiler_options: dict[str, bool | int | str] | None = None,
    **jit_options: Any,
) -> jax.stages.Compiled:
    """Compile for arguments of these shapes.

    Threads may: they take turns in tracing, which is Python's and kernels' own work, and
    compile side by side.
    """
    with _TRACING:
        lowered = jax.jit(function, **jit_options).lower(*arguments)
    return lowered.compile(compiler_options)
