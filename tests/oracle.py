"""The float64 oracle of gradients: a plain scan over tokens, differentiated by JAX.

All six variants are one recurrence with an erasing strength (0 without the delta rule) and a
writing strength (1 without it), so a shape costs one compilation for any variant::

    S_t = (I - erase_t k_t^T k_t) Diag(exp(g_t)) S_{t-1} + write_t k_t^T v_t

`tests/test_oracle.py` checks it against `deltanet_jax.core.reference`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax import compat
from tests.cases import FAMILIES, Inputs, Shape, rng_for

HIGHEST = jax.lax.Precision.HIGHEST


class Expected(NamedTuple):
    o: np.ndarray
    state: np.ndarray
    gradients: dict[str, np.ndarray]


def _recurrence(x: dict[str, jax.Array], scale: float) -> tuple[jax.Array, jax.Array]:
    group = x["v"].shape[2] // x["q"].shape[2]
    q, k = (jnp.repeat(x[name], group, axis=2) for name in ("q", "k"))

    def token(S: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, erase, write, keep = row
        S = S * keep[:, None, None, None] * jnp.exp(g)[..., None]
        error = jnp.einsum("bhk,bhkv->bhv", k, S, precision=HIGHEST)
        change = write[..., None] * v - erase[..., None] * error
        S = S + k[..., None] * change[..., None, :]
        return S, scale * jnp.einsum("bhk,bhkv->bhv", q, S, precision=HIGHEST)

    rows = (q, k, x["v"], x["g"], x["erase"], x["write"], x["keep"])
    state, o = jax.lax.scan(token, x["initial_state"], [jnp.moveaxis(r, 1, 0) for r in rows])
    return jnp.moveaxis(o, 0, 1), state


@functools.partial(jax.jit, static_argnames="scale")
def _pullback(x: dict, cotangents: tuple, scale: float) -> tuple:
    outputs, pull = jax.vjp(functools.partial(_recurrence, scale=scale), x)
    return outputs, pull(cotangents)[0]


def _general(inputs: Inputs) -> dict[str, np.ndarray]:
    q, v = inputs["q"], inputs["v"]
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    g, beta = inputs.get("g", np.zeros((B, T, HV))), inputs.get("beta")
    g = g if g.ndim == 4 else np.repeat(g[..., None], K, axis=-1)
    ids = inputs.get("segment_ids", np.zeros((B, T)))
    state = inputs.get("initial_state", np.zeros((B, HV, K, V)))
    x = {
        "q": q,
        "k": inputs["k"],
        "v": v,
        "g": np.maximum(g, -1e5),  # -inf: exp is 0 either way
        "erase": np.zeros((B, T, HV)) if beta is None else beta,
        "write": np.ones((B, T, HV)) if beta is None else beta,
        "keep": 1.0 - np.diff(ids, axis=1, prepend=ids[:, :1]).astype(bool),
        "initial_state": state,
    }
    return {name: np.asarray(value, np.float64) for name, value in x.items()}


def expected(
    inputs: Inputs,
    cotangents: tuple[np.ndarray, np.ndarray] | None = None,
    scale: float | None = None,
) -> Expected:
    """Outputs, final state and the gradient of every floating-point input, in float64."""
    scale = inputs["q"].shape[-1] ** -0.5 if scale is None else scale
    if cotangents is None:
        cotangents = cotangents_for(inputs)
    wide = tuple(np.asarray(c, np.float64) for c in cotangents)
    with compat.enable_x64():
        (o, state), gradients = jax.device_get(_pullback(_general(inputs), wide, scale))
    if "g" in inputs and inputs["g"].ndim == 3:
        gradients["g"] = gradients["g"].sum(-1)
    gradients["beta"] = gradients.pop("erase") + gradients.pop("write")
    wanted = {name: gradients[name] for name in inputs if name != "segment_ids"}
    return Expected(o, state, wanted)


def cotangents_for(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Fixed random cotangents of outputs and state, in float32."""
    B, T, HV, V = inputs["v"].shape
    K = inputs["q"].shape[-1]
    rng = rng_for("cotangents", B, T, HV, K, V)
    shapes = (B, T, HV, V), (B, HV, K, V)
    return tuple(rng.standard_normal(s).astype(np.float32) for s in shapes)


@functools.lru_cache(maxsize=64)
def expected_of_case(variant: str, shape: Shape, family: str) -> tuple[Inputs, Expected]:
    """Inputs of a case of the grid, and what it must give; shared by all implementations."""
    inputs = FAMILIES[family](variant, shape)
    return inputs, expected(inputs)
