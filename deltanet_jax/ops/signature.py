"""Calls that do not fit a signature become errors that name the arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar, get_args, get_type_hints

__all__ = ["CallError", "checked_call", "required"]

P = ParamSpec("P")
R = TypeVar("R")


class CallError(ValueError, TypeError):
    """A call whose arguments do not fit the signature; both of the errors people catch."""


def checked_call(function: Callable[P, R]) -> Callable[P, R]:
    """Spell out `**options` in the signature, and name the arguments when a call does not fit."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for p in signature.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            keywords = get_type_hints(get_args(p.annotation)[0])
            parameters += [
                p.replace(name=name, kind=p.KEYWORD_ONLY, default=None, annotation=hint)
                for name, hint in keywords.items()
            ]
    signature = signature.replace(parameters=parameters)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            names = ", ".join(signature.parameters)
            raise CallError(f"{function.__name__}() {error}; its arguments are {names}") from None
        return function(*args, **kwargs)

    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper


def required(name: str, x: R | None) -> R:
    """`x`, which must be given here."""
    if x is None:
        raise ValueError(f"`{name}` is required here; got None (`linear_attention` takes None)")
    return x
