"""List of all cases: variants x implementations x shapes, and the families of inputs.

Inputs are dictionaries of NumPy float32 arrays whose keys are arguments of
`linear_attention`, so that an oracle in float64 sees exactly the same numbers.
"""

import zlib
from typing import Any, NamedTuple

import numpy as np
import pytest

from deltanet_jax.ops import dispatch

Inputs = dict[str, np.ndarray]


class Variant(NamedTuple):
    """A variant: which of the gates it has, and whether the delta rule."""

    gate: str  # "none", "scalar" or "vector"
    delta: bool


class Shape(NamedTuple):
    B: int
    T: int
    H: int
    K: int
    V: int
    group: int = 1  # value heads per key head

    @property
    def HV(self) -> int:
        return self.H * self.group

    def __str__(self) -> str:
        heads = f"H{self.H}" if self.group == 1 else f"H{self.H}-HV{self.HV}"
        return f"B{self.B}-T{self.T}-{heads}-K{self.K}-V{self.V}"


VARIANTS = {
    "linear": Variant("none", delta=False),
    "scalar_gla": Variant("scalar", delta=False),
    "gla": Variant("vector", delta=False),
    "delta": Variant("none", delta=True),
    "gated_delta": Variant("scalar", delta=True),
    "kda": Variant("vector", delta=True),
}

# Names that run every call; the kernels have tests of their own.
PORTABLE = tuple(n for n, row in dispatch.IMPLEMENTATIONS.items() if row.why_not is None)
# Those that work in chunks when they are given a chunk size.
CHUNKED = tuple(name for name in PORTABLE if name != "recurrent")

# What a test passes to the public function; "associative_chunks" scans the maps of chunks.
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    name: {"implementation": name} for name in PORTABLE
} | {"associative_chunks": {"implementation": "associative", "chunk_size": 16}}
# Those whose work per token does not grow with K^3.
LONG = tuple(name for name in IMPLEMENTATIONS if name != "associative")

SHAPES = {
    "below_a_chunk": Shape(2, 63, 3, 16, 24),
    "three_chunks": Shape(2, 130, 2, 24, 40),
    "two_segments": Shape(1, 583, 1, 8, 12, group=2),  # 583 > 512, and 64 does not divide it
}

# Three chunks with a state is where faults show: every pair runs there. The other shapes take
# the variants and the algorithms whose code depends on the length.
GRID = {
    "below_a_chunk": (("delta", "kda"), tuple(IMPLEMENTATIONS)),
    "three_chunks": (tuple(VARIANTS), tuple(IMPLEMENTATIONS)),
    "two_segments": (("linear", "gated_delta", "kda"), LONG),
}


def rng_for(*key: object) -> np.random.Generator:
    """A generator that depends on what it is for, and on nothing else."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gate_shape(variant: Variant, shape: Shape) -> tuple[int, ...]:
    B, T, _, K, _, _ = shape
    return (B, T, shape.HV, K) if variant.gate == "vector" else (B, T, shape.HV)


def layer_like(variant: str, shape: Shape, seed: int = 0) -> Inputs:
    """Inputs as of a layer at initialisation: SiLU, unit keys, sigmoid beta, softplus gates."""
    rng, kind = rng_for("layer", variant, shape, seed), VARIANTS[variant]
    B, T, H, K, V, _ = shape
    inputs = {
        "q": unit(silu(rng.standard_normal((B, T, H, K)))),
        "k": unit(silu(rng.standard_normal((B, T, H, K)))),
        "v": silu(rng.standard_normal((B, T, shape.HV, V))),
        "initial_state": rng.standard_normal((B, shape.HV, K, V)),
    }
    if kind.gate != "none":
        step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), gate_shape(kind, shape)))
        inputs["g"] = -rng.uniform(0.1, 16, (shape.HV,) + (1,) * (kind.gate == "vector")) * step
    if kind.delta:
        inputs["beta"] = 1 / (1 + np.exp(-rng.standard_normal((B, T, shape.HV))))
    return {name: x.astype(np.float32) for name, x in inputs.items()}


# Values that a formula may divide by, take a logarithm of or leave out, a row of the batch each.
DEGENERATE: dict[str, dict[str, float]] = {
    "beta 0": {"beta": 0.0},
    "q 0": {"q": 0.0},
    "k 0": {"k": 0.0},
    "v 0": {"v": 0.0},
    "g 0": {"g": 0.0},
    "g -inf": {"g": -np.inf},
    "state 0": {"initial_state": 0.0},
    "all 0": dict.fromkeys(("q", "k", "v", "g", "beta", "initial_state"), 0.0),
}


def degenerate(variant: str, shape: Shape) -> Inputs:
    """Inputs whose row `i` of the batch has the `i`-th of `DEGENERATE`."""
    inputs = layer_like(variant, shape._replace(B=len(DEGENERATE)))
    for row, values in enumerate(DEGENERATE.values()):
        for name in values.keys() & inputs.keys():
            inputs[name][row] = values[name]
    return inputs


def _with_keys(inputs: Inputs, keys: np.ndarray) -> Inputs:
    return inputs | {"k": unit(keys).astype(np.float32)}


def _with_beta(inputs: Inputs, beta: np.ndarray | float) -> Inputs:
    if "beta" not in inputs:
        return inputs
    return inputs | {"beta": np.broadcast_to(np.float32(beta), inputs["beta"].shape).copy()}


def correlated(variant: str, shape: Shape, seed: int = 0, *, cos: float = 0.9) -> Inputs:
    """Keys whose mutual cosine is `cos`, and beta anywhere in [0, 2]."""
    inputs, rng = layer_like(variant, shape, seed), rng_for("correlated", cos, shape, seed)
    noise = unit(rng.standard_normal(inputs["k"].shape))
    common = unit(rng.standard_normal((shape.B, 1, shape.H, shape.K)))
    noise = unit(noise - np.sum(noise * common, -1, keepdims=True) * common)
    inputs = _with_keys(inputs, np.sqrt(cos) * common + np.sqrt(1 - cos) * noise)
    return _with_beta(inputs, rng.uniform(0, 2, (shape.B, shape.T, shape.HV)))


def mildly_correlated(variant: str, shape: Shape, seed: int = 0) -> Inputs:
    return correlated(variant, shape, seed, cos=0.6)


def identical_keys(variant: str, shape: Shape, seed: int = 0) -> Inputs:
    """One key for all tokens and beta = 2: every step reflects the state."""
    inputs = layer_like(variant, shape, seed)
    return _with_beta(_with_keys(inputs, inputs["k"][:, :1] + 0 * inputs["k"]), 2.0)


def unit_beta_identical_keys(variant: str, shape: Shape, seed: int = 0) -> Inputs:
    """One key for all tokens and beta = 1, where powers of the system explode."""
    inputs = layer_like(variant, shape, seed)
    return _with_beta(_with_keys(inputs, inputs["k"][:, :1] + 0 * inputs["k"]), 1.0)


def _with_gate(variant: str, shape: Shape, seed: int, low: float, high: float) -> Inputs:
    inputs, rng = layer_like(variant, shape, seed), rng_for("gate", low, variant, shape, seed)
    gate = rng.uniform(low, high, gate_shape(VARIANTS[variant], shape))
    return inputs | {"g": gate.astype(np.float32)}


def strong_decay(variant: str, shape: Shape, seed: int = 0) -> Inputs:
    """About -5 per token: `exp` of one chunk's cumulative sum underflows float32."""
    return _with_gate(variant, shape, seed, -8.0, -2.0)


def weak_decay(variant: str, shape: Shape, seed: int = 0) -> Inputs:
    """A large initial state survives to the last token: nothing that touches it can hide."""
    inputs = _with_gate(variant, shape, seed, -2e-3, 0.0)
    if "beta" in inputs:
        inputs["beta"] = inputs["beta"] * np.float32(0.2)
    return inputs | {"initial_state": 3 * inputs["initial_state"]}


def sudden_decay(variant: str, shape: Shape, seed: int = 0) -> Inputs:
    """Weak gates with a huge one here and there, after which sums have no digits left."""
    inputs, rng = weak_decay(variant, shape, seed), rng_for("sudden", variant, shape, seed)
    hit = rng.random((shape.B, shape.T, shape.HV)) < 0.1
    hit = hit[..., None] if inputs["g"].ndim == 4 else hit
    return inputs | {"g": np.where(hit, np.float32(-3e4), inputs["g"])}


FAMILIES = {
    "layer": layer_like,
    "cos6": mildly_correlated,
    "cos9": correlated,
    "reflect": identical_keys,
    "repeat": unit_beta_identical_keys,
    "strong": strong_decay,
    "weak": weak_decay,
    "sudden": sudden_decay,
}
GATED_FAMILIES = ("strong", "weak", "sudden")


def families_of(variant: str) -> list[str]:
    """The families that differ from "layer" for this variant."""
    kind = VARIANTS[variant]
    skipped = set() if kind.gate != "none" else set(GATED_FAMILIES)
    skipped |= set() if kind.delta else {"cos6", "repeat"}
    return [family for family in FAMILIES if family not in skipped]


def pairs(variants: tuple[str, ...] = tuple(VARIANTS)) -> list[Any]:
    """`(variant, implementation)` for the tests that need no list of shapes."""
    return [
        pytest.param(variant, implementation, id=f"{variant}-{implementation}")
        for variant in variants
        for implementation in IMPLEMENTATIONS
    ]


def grid() -> list[Any]:
    """`(variant, implementation, shape, family)`; neighbours share one compiled program."""
    return [
        pytest.param(
            variant,
            implementation,
            SHAPES[name],
            family,
            id=f"{variant}-{implementation}-{SHAPES[name]}-{family}",
        )
        for name, (variants, implementations) in GRID.items()
        for variant in variants
        for implementation in implementations
        for family in families_of(variant)
    ]
