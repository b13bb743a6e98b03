"""Checks of options and of integer arrays; every message names the argument.

A `bool` is no integer, a `str` is no number, and NaN and infinity are named. Each check returns
the value in the plain type that the rest of the package computes in.
"""

import math
import numbers
import operator
from collections.abc import Callable, Collection
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from deltanet_jax import compat

__all__ = [
    "axis_size",
    "check_shape",
    "check_whole_time",
    "choice",
    "flag",
    "integer_array",
    "integers",
    "known",
    "number",
    "optional",
    "whole",
]

P = ParamSpec("P")
R = TypeVar("R")


def whole(name: str, x: object, *, least: int | None = None, most: int | None = None) -> int:
    """Return an `int` in `[least, most]`.

    Raises:
        ValueError: If `x` is no integer, or out of this range.
    """
    value = _as_int(x)
    if value is None or not _within(value, least, most):
        wanted = "a positive integer" if (least, most) == (1, None) else "an integer"
        _refuse(name, wanted + ("" if least == 1 and most is None else _range(least, most)), x)
    return value


def axis_size(name: str, x: Any) -> int:
    """Return a positive `int`, or a symbolic size of `jax.export` as it is."""
    if is_symbolic_dim(x):
        return cast(int, x)
    return whole(name, x, least=1)


def number(
    name: str,
    x: object,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> float:
    """Return a finite `float` in `[least, most]`, or greater than `above`.

    Raises:
        ValueError: If `x` is no real number, is not finite, or is out of this range.
    """
    wanted = "a positive number" if above == 0 and most is None else "a number"
    if above not in (None, 0) or (above == 0 and most is not None):
        wanted += f" > {above}"
    wanted += _range(least, most)
    value = _as_float(x)
    if value is None:
        _refuse(name, wanted, x)
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite; got {value}")
    if not _within(value, least, most) or (above is not None and value <= above):
        _refuse(name, wanted, x)
    return value


def flag(name: str, x: object) -> bool:
    """Return a `bool`; numbers and text that Python takes for one are refused."""
    if not isinstance(x, bool | np.bool_):
        _refuse(name, "True or False", x)
    return bool(x)


def choice(name: str, x: object, options: Collection[str]) -> str:
    """Return a name that is one of `options`."""
    if not isinstance(x, str) or x not in options:
        _refuse(name, f"one of {', '.join(options)}", x)
    return x


def optional(
    check: Callable[Concatenate[str, Any, P], R],
    name: str,
    x: object,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R | None:
    """Return `None` for `None`, and `check(name, x, ...)` for everything else."""
    return None if x is None else check(name, x, *args, **kwargs)


def check_shape(
    name: str, got: tuple[int, ...], axes: str, shape: tuple[int | None, ...] | None = None
) -> None:
    """Raise unless a shape has the axes of `axes`, and the sizes that `shape` fixes."""
    if len(got) != axes.count(",") + 1:
        raise ValueError(f"`{name}` must have shape {axes}; got {got}")
    if shape is not None and any(w not in (None, n) for w, n in zip(shape, got, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"`{name}` must have shape {axes} = [{wanted}]; got {got}")


def check_whole_time(name: str, x: jax.Array) -> None:
    """Raise if axis 1, time, is split over explicit axes of a mesh."""
    axes = compat.split_over(x, 1)
    if axes is not None:
        raise ValueError(
            f"`{name}` must not be sharded along time, its axis 1; got mesh axis {axes}. Layers "
            "and models take such inputs with `context_axis`"
        )


def integer_array(
    name: str, x: object, axes: str, shape: tuple[int | None, ...] | None = None
) -> jax.Array | np.ndarray:
    """Return an array of integers as it is, with axes such as `"[B, T]"`."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"`{name}` must be an integer array {axes}; got {type(x).__name__}")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"`{name}` must have an integer dtype; got {x.dtype}")
    check_shape(name, x.shape, axes, shape)
    return x


def integers(
    name: str,
    x: object,
    axes: str,
    shape: tuple[int | None, ...] | None = None,
    *,
    least: int | None = None,
    most: int | None = None,
) -> jax.Array:
    """Return an array of integers in JAX's default integer type, whatever type it comes in.

    Sums and products of lengths or offsets overflow narrow types without a word, so nothing
    computes in the caller's type. Values are checked where they are known.

    Raises:
        ValueError: If `x` is no integer array with these axes, or its known values are out of
            `[least, most]` or of the default type.
    """
    array = integer_array(name, x, axes, shape)
    default = np.dtype(jnp.result_type(int))
    values = known(array)
    if values is not None and values.size:
        limits, extremes = np.iinfo(default), (int(values.min()), int(values.max()))
        for value in extremes:
            if not _within(value, least, most):
                raise ValueError(f"`{name}` must be{_range(least, most)}; got {value}")
            if not _within(value, int(limits.min), int(limits.max)):
                raise ValueError(f"`{name}` must fit into {default}; got {value}")
    return jnp.asarray(array, default)


def known(x: object) -> np.ndarray | None:
    """Return the values of an array as they stand, or `None` while it is traced or elsewhere."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return None
    return np.asarray(jax.device_get(x)) if x.is_fully_addressable else None


def _as_int(x: object) -> int | None:
    if isinstance(x, bool | np.bool_):
        return None
    try:
        return operator.index(x)  # type: ignore[arg-type]
    except TypeError:
        return None


def _as_float(x: Any) -> float | None:
    """Convert a real number, or an array without axes whose value is known."""
    if isinstance(x, jax.Array | np.ndarray | np.generic) and x.ndim == 0:
        values = known(np.asarray(x) if isinstance(x, np.generic) else x)
        is_number = jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
        return float(values) if values is not None and is_number else None
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        return None
    try:
        return float(x)
    except OverflowError:  # an integer beyond every float
        return -math.inf if x < 0 else math.inf


def _within(value: float, least: float | None, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _range(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" in [{least}, {most}]"
    if least is not None:
        return f" >= {least}"
    return "" if most is None else f" <= {most}"


def _refuse(name: str, wanted: str, x: object) -> NoReturn:
    try:
        got = repr(x)
    except ValueError:  # an integer of more digits than Python prints
        got = ""
    if not 0 < len(got) <= 80:
        got = type(x).__name__
    raise ValueError(f"`{name}` must be {wanted}; got {got}")
