"""Problems for the TPU kernels, and what they must give."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.core.problem import Problem, Tokens
from tests import oracle

ARRAYS = ("q", "k", "v", "g", "beta", "initial_state")
HIGHEST = jax.lax.Precision.HIGHEST
Run = Callable[[Problem], tuple[jax.Array, jax.Array]]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _gate(kind: str | None, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray | None:
    weak, draw = -0.02 * rng.random(shape), rng.random(shape)
    kinds = {
        None: None,
        "weak": weak,
        "strong": -5 * draw,
        "to-20": np.where(draw < 0.5, -40 * draw, weak),
        # Sums over short ranges of normal gates beside gates that leave no digits for them.
        "mixed": np.where(draw < 0.3, -60.0, weak),
        "resets": np.where(draw < 0.1, -np.inf, weak),
    }
    return kinds[kind]


def problem(
    B: int = 2,
    T: int = 70,
    H: int = 2,
    HV: int = 2,
    K: int = 64,
    V: int = 64,
    *,
    dtype: str = "float32",
    gate: str | None = None,
    vector: bool = False,
    delta: bool = True,
    segments: bool = False,
    state: bool = True,
    correlation: float = 0.0,
    largest_beta: float = 1.0,
) -> Problem:
    """Unit keys, pairwise cosine `correlation`; `beta` uniform up to `largest_beta`.

    The gate is one per head, or per key channel if `vector`.
    """
    rng = np.random.default_rng(T + HV)
    draw = rng.standard_normal
    common = np.sqrt(correlation) * _unit(draw((1, 1, H, K)))
    keys = _unit(common + np.sqrt(1 - correlation) * _unit(draw((B, T, H, K))))
    reset = np.zeros((B, T), bool)
    reset[:, [T // 3, T // 2]] = True
    reset[0, min(T - 1, T // 2 + 1)] = True
    g = _gate(gate, rng, (B, T, HV, K) if vector else (B, T, HV))
    tokens = Tokens(
        q=jnp.asarray(_unit(draw((B, T, H, K))), dtype),
        k=jnp.asarray(keys, dtype),
        v=jnp.asarray(draw((B, T, HV, V)), dtype),
        g=None if g is None else jnp.asarray(g, jnp.float32),
        beta=jnp.asarray(largest_beta * rng.random((B, T, HV)), jnp.float32) if delta else None,
    )
    return Problem(
        tokens,
        initial_state=jnp.asarray(0.3 * draw((B, HV, K, V)), jnp.float32) if state else None,
        reset=jnp.asarray(reset) if segments else None,
        scale=K**-0.5,
        precision=HIGHEST if dtype == "float32" else None,
    )


def cotangents(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    (B, T, HV, V), K = p.v.shape, p.k.shape[-1]
    rng = np.random.default_rng(1)
    do = jnp.asarray(rng.standard_normal((B, T, HV, V)), p.v.dtype)
    return np.asarray(do.astype(jnp.float32)), rng.standard_normal((B, HV, K, V)).astype("float32")


def with_arrays(p: Problem, **arrays: jax.Array) -> Problem:
    """Return the problem with other arrays under these names."""
    tokens = {name: x for name, x in arrays.items() if name in p.tokens._fields}
    others = {name: x for name, x in arrays.items() if name not in tokens}
    return dataclasses.replace(p.with_tokens(**tokens), **others)


def values_and_gradients(run: Run, p: Problem) -> dict[str, np.ndarray]:
    """`o`, `final_state`, and the gradient `dx` of every array x that the problem has."""
    arrays = {name: getattr(p, name) for name in ARRAYS if getattr(p, name) is not None}
    seeds = cotangents(p)

    @jax.jit
    def pull(arrays: dict[str, jax.Array]) -> tuple:
        outputs, vjp = jax.vjp(lambda x: run(with_arrays(p, **x)), arrays)
        given = [jnp.asarray(c, x.dtype) for c, x in zip(seeds, outputs, strict=True)]
        return outputs, vjp(tuple(given))[0]

    (o, state), gradients = pull(arrays)
    for name, gradient in gradients.items():
        assert gradient.dtype == arrays[name].dtype, name
    named = {f"d{name}": x for name, x in gradients.items()}
    return {
        name: np.asarray(x, np.float64)
        for name, x in {"o": o, "final_state": state, **named}.items()
    }


def expected(p: Problem) -> dict[str, np.ndarray]:
    """Expected result of `values_and_gradients`, in float64."""
    arrays = {name: getattr(p, name) for name in ARRAYS if getattr(p, name) is not None}
    inputs = {name: np.asarray(x.astype(jnp.float32)) for name, x in arrays.items()}
    if p.reset is not None:
        inputs["segment_ids"] = np.cumsum(p.reset, axis=1)
    want = oracle.expected(inputs, cotangents(p))
    gradients = {f"d{name}": x for name, x in want.gradients.items()}
    return {"o": want.o, "final_state": want.state, **gradients}
