"""Checks of options: those of the command line, and those that config.json of a run holds."""

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from deltanet_jax.core import checks
from experiments.record import RecordError

__all__ = ["check_numbers", "restore_options"]

Options = TypeVar("Options")

# Integers that may be 0.
ZERO = frozenset(
    ("seed", "process_id", "threads", "optimization_level", "oracle_tokens", "gradient_tokens")
)


def restore_options(kind: type[Options], saved: Mapping[str, Any]) -> Options:
    """Return the options that a run was started with; keys that are unknown now are left out.

    Raises:
        RecordError: If an option has a value of another type.
    """
    values = {}
    for name, hint in get_type_hints(kind).items():
        if name in saved and name not in ("resume", "results"):
            try:
                values[name] = _typed(saved[name], hint)
            except TypeError:
                text = f"{saved[name]!r:.80}"
                raise RecordError(f"config.json of the run has `{name}` = {text}") from None
    options = kind(**values)
    check_numbers(options)
    return options


def check_numbers(options: object) -> None:
    """Raise `ValueError` unless counts are positive and all numbers are finite and not negative."""
    for name in get_type_hints(type(options)):
        value = getattr(options, name)
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, float):
                checks.number(name, x, least=0)
            elif isinstance(x, int) and not isinstance(x, bool):
                checks.whole(name, x, least=0 if name in ZERO else 1)


def _typed(value: Any, hint: Any) -> Any:
    """Turn a value of JSON into this type; a tuple is a list there, and a path is text."""
    arguments, origin = get_args(hint), get_origin(hint)
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if origin in (types.UnionType, Union):
        for one in arguments:
            try:
                return _typed(value, one)
            except TypeError:
                continue
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(x, arguments[0]) for x in value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return value
    if origin is None and isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    raise TypeError
