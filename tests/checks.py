"""Running a case with its gradients in one compiled program, and comparing everything."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax import linear_attention
from tests.cases import IMPLEMENTATIONS, Inputs
from tests.oracle import Expected, cotangents_for
from tests.tolerances import TOLERANCES, assert_close

INTEGERS = ("segment_ids", "cu_seqlens")


def call(inputs: dict[str, jax.Array], **options: Any) -> tuple[jax.Array, jax.Array]:
    """`linear_attention` with everything by name."""
    return linear_attention(**inputs, **options)


@functools.partial(jax.jit, static_argnames="options")
def _pullback(inputs: dict, cotangents: tuple, options: tuple) -> tuple:
    fixed = {name: x for name, x in inputs.items() if name in INTEGERS}
    floats = {name: x for name, x in inputs.items() if name not in INTEGERS}
    outputs, pull = jax.vjp(lambda x: call(x | fixed, **dict(options)), floats)
    cotangents = jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, outputs)
    return outputs, pull(cotangents)[0]


def run(
    inputs: Inputs,
    name: str,
    /,
    *,
    cotangents: tuple[np.ndarray, np.ndarray] | None = None,
    **options: Any,
) -> Expected:
    """Outputs, state and gradients of one implementation of `cases.IMPLEMENTATIONS`."""
    static = tuple(sorted((IMPLEMENTATIONS[name] | options).items()))
    cotangents = cotangents_for(inputs) if cotangents is None else cotangents
    (o, state), gradients = _pullback(inputs, cotangents, static)
    return Expected(o, state, gradients)


def assert_matches(got: Expected, want: Expected, dtype: str = "float32") -> None:
    """Outputs, state and every gradient, within the tolerances of `dtype`."""
    tolerance = TOLERANCES[dtype]
    assert_close("o", got.o, want.o, tolerance.forward)
    assert_close("final_state", got.state, want.state, tolerance.forward)
    assert set(got.gradients) == set(want.gradients)
    for name, gradient in want.gradients.items():
        assert_close(f"d{name}", got.gradients[name], gradient, tolerance.gradient)


def cast(inputs: Inputs, dtype: Any, names: tuple[str, ...] = ("q", "k", "v")) -> dict:
    """The inputs with those of `names` in another dtype."""
    return {n: jnp.asarray(x, dtype) if n in names else x for n, x in inputs.items()}
