"""Problems for the Hopper kernels, and the error of every tensor against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.core.problem import Problem, Tokens
from tests.oracle import cotangents_for, expected
from tests.tolerances import relative_rms

GRADIENTS = ("q", "k", "v", "g", "beta", "initial_state")


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def inputs(
    B: int = 1,
    T: int = 100,
    H: int = 1,
    HV: int = 1,
    K: int = 64,
    V: int = 64,
    *,
    delta: bool = True,
    gate: float | None = None,
    channels: bool = False,
    cos: float = 0.0,
    largest_beta: float = 1.0,
    segments: bool = False,
    dtype: str = "bfloat16",
) -> dict[str, np.ndarray]:
    """Unit keys of pairwise cosine `cos`, values that `dtype` holds.

    Gates go down to `-gate`, one for each head or, with `channels`, for each key channel.
    """
    rng = np.random.default_rng((B, T, HV, K, V))

    def rounded(x: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(x, jnp.float32).astype(dtype).astype(jnp.float32))

    draw = rng.standard_normal
    common = np.sqrt(cos) * _unit(draw((1, 1, H, K)))
    x = {
        "q": rounded(_unit(draw((B, T, H, K)))),
        "k": rounded(_unit(common + np.sqrt(1 - cos) * _unit(draw((B, T, H, K))))),
        "v": rounded(draw((B, T, HV, V))),
        "initial_state": (0.3 * draw((B, HV, K, V))).astype(np.float32),
    }
    if delta:
        x["beta"] = (largest_beta * rng.random((B, T, HV))).astype(np.float32)
    if gate is not None:
        sizes = (B, T, HV, K) if channels else (B, T, HV)
        x["g"] = (-gate * rng.random(sizes)).astype(np.float32)
    if segments:
        x["segment_ids"] = np.cumsum(rng.random((B, T)) < 5 / T, axis=1)
    return x


def problem(x: dict[str, jax.Array], dtype: str = "bfloat16") -> Problem:
    x = {name: jnp.asarray(value) for name, value in x.items()}
    ids = x.get("segment_ids")
    reset = None if ids is None else jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    q, k, v = (x[name].astype(dtype) for name in "qkv")
    tokens = Tokens(q, k, v, x.get("g"), x.get("beta"))
    scale = x["q"].shape[-1] ** -0.5
    return Problem(tokens, x.get("initial_state"), reset=reset, scale=scale)


def outputs_and_gradients(run, x: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """`o`, `state` and the gradient `dx` of every differentiable array."""
    arrays = {name: jnp.asarray(value) for name, value in x.items()}
    ids = {name: arrays.pop(name) for name in ("segment_ids",) if name in arrays}
    do, dstate = cotangents_for(x)

    @jax.jit
    def both(arrays, cotangents):
        function = lambda arrays: run(problem(arrays | ids, dtype))  # noqa: E731
        outputs, pull = jax.vjp(function, arrays)
        return outputs, pull(cotangents)[0]

    (o, state), gradients = both(arrays, (jnp.asarray(do).astype(dtype), jnp.asarray(dstate)))
    return {"o": o, "state": state} | {f"d{name}": g for name, g in gradients.items()}


def errors(run, x: dict[str, np.ndarray], dtype: str = "bfloat16") -> dict[str, float]:
    """Relative rms error of every output and gradient."""
    do, dstate = cotangents_for(x)
    do = np.asarray(jnp.asarray(do).astype(dtype).astype(jnp.float32))
    want = expected(x, (do, dstate))
    wanted = {"o": want.o, "state": want.state}
    wanted |= {f"d{name}": g for name, g in want.gradients.items()}
    got = outputs_and_gradients(run, x, dtype)
    return {name: relative_rms(np.asarray(got[name]), wanted[name]) for name in wanted}
