"""Calls that do not fit a signature become errors that name the arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar, get_args, get_type_hints

import jax
import numpy as np

__all__ = ["CallError", "ConstructorSignature", "checked_call", "gate_of_rank", "required"]

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
            names = ", ".join(name for name in signature.parameters if name != "self")
            raise CallError(
                f"{function.__qualname__}() {error}; its arguments are {names}"
            ) from None
        return function(*args, **kwargs)

    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper


class ConstructorSignature:
    """Attribute `__signature__` of a class whose metaclass hides that of `__init__`."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:  # a call of the instance has a signature of its own
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        _, *parameters = signature.parameters.values()
        return signature.replace(parameters=parameters, return_annotation=signature.empty)


def required(name: str, x: R | None) -> R:
    """`x`, which must be given here."""
    if x is None:
        raise ValueError(f"`{name}` is required here; got None (`linear_attention` takes None)")
    return x


def gate_of_rank(rank: int, g: jax.Array | None, axes: str, other: str) -> jax.Array:
    """Return the gate, whose shape the name of the function fixes."""
    gate = required("g", g)
    if isinstance(gate, jax.Array | np.ndarray) and gate.ndim != rank:
        raise ValueError(f"`g` must have shape {axes}; got {gate.shape} ({other})")
    return gate
