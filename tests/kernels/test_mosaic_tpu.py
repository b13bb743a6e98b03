"""The TPU kernels in Pallas's interpreters, against a float64 recurrence and its gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from deltanet_jax.core.problem import Problem
from deltanet_jax.kernels import mosaic_tpu
from deltanet_jax.kernels.mosaic_tpu import tile
from tests.kernels.tpu_problems import (
    HIGHEST,
    cotangents,
    expected,
    problem,
    values_and_gradients,
    with_arrays,
)
from tests.tolerances import TOLERANCES, assert_close, relative_rms

CASES = {
    "delta-T70-V128": (32, {"V": 128}),
    "delta-gate-segments-grouped": (32, {"H": 1, "gate": "weak", "segments": True}),
    "delta-segments-T1-no-state": (16, {"T": 1, "state": False}),
    "linear-K128": (16, {"T": 50, "K": 128, "delta": False}),
    "linear-mixed-gate-heads-over-cells": (
        16,
        {"T": 50, "H": 1, "HV": 6, "gate": "mixed", "delta": False, "segments": True},
    ),
    "delta-gate-minus-infinity": (16, {"T": 50, "H": 1, "HV": 4, "gate": "resets"}),
    "delta-strong-gate-no-state": (16, {"T": 50, "gate": "strong", "state": False}),
    "delta-mixed-gate": (64, {"B": 1, "T": 150, "H": 1, "HV": 1, "gate": "mixed"}),
    "delta-correlated-keys": (
        64,
        {"B": 1, "T": 150, "H": 1, "HV": 1, "correlation": 0.9, "largest_beta": 2.0},
    ),
    "delta-C128-bf16": (128, {"B": 1, "T": 300, "H": 1, "HV": 1, "dtype": "bfloat16"}),
    "delta-gate-segments-bf16": (
        64,
        {"B": 1, "T": 150, "H": 1, "HV": 2, "gate": "weak", "segments": True, "dtype": "bfloat16"},
    ),
    "delta-alike-keys-bf16": (
        64,
        {
            "B": 1,
            "T": 150,
            "H": 1,
            "HV": 1,
            "correlation": 0.9,
            "largest_beta": 2.0,
            "dtype": "bfloat16",
        },
    ),
    "linear-gate-bf16": (
        64,
        {"B": 1, "T": 150, "gate": "weak", "delta": False, "dtype": "bfloat16"},
    ),
    "kda-to-20-V128": (
        32,
        {"B": 1, "T": 70, "H": 1, "HV": 1, "V": 128, "vector": True, "gate": "to-20"},
    ),
    "kda-minus-infinity-segments-grouped": (
        16,
        {"T": 40, "H": 1, "vector": True, "gate": "resets", "segments": True},
    ),
    "kda-K128-T1-no-state": (
        16,
        {"B": 1, "T": 1, "H": 1, "HV": 1, "K": 128, "vector": True, "gate": "weak", "state": False},
    ),
    "gla-mixed-gate-heads-over-cells": (
        16,
        {"B": 1, "T": 20, "H": 1, "HV": 6, "vector": True, "gate": "mixed", "delta": False},
    ),
    "kda-correlated-keys": (
        64,
        {
            "B": 1,
            "T": 100,
            "H": 1,
            "HV": 1,
            "vector": True,
            "gate": "weak",
            "correlation": 0.9,
            "largest_beta": 2.0,
        },
    ),
    "kda-C128-bf16": (
        128,
        {
            "B": 1,
            "T": 150,
            "H": 1,
            "HV": 1,
            "vector": True,
            "gate": "weak",
            "dtype": "bfloat16",
        },
    ),
}


def interpreted(p: Problem, chunk_size: int, interpret: object = True) -> dict[str, np.ndarray]:
    run = functools.partial(mosaic_tpu.chunkwise, chunk_size=chunk_size, interpret=interpret)
    return values_and_gradients(run, p)


def assert_matches(got: dict[str, np.ndarray], want: dict[str, np.ndarray], dtype: str) -> None:
    assert set(got) == set(want)
    bounds = TOLERANCES[dtype]
    for name in want:
        forward = name in ("o", "final_state")
        assert_close(name, got[name], want[name], bounds.forward if forward else bounds.gradient)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_recurrence(name: str) -> None:
    chunk_size, options = CASES[name]
    p = problem(**options)
    assert mosaic_tpu.why_not(p, chunk_size) is None
    assert_matches(interpreted(p, chunk_size), expected(p), options.get("dtype", "float32"))


@pytest.mark.parametrize(
    "options",
    [{"T": 40}, {"T": 40, "delta": False}, {"B": 1, "T": 20, "vector": True}],
    ids=["delta", "linear", "kda"],
)
def test_no_race_no_stray_read_in_the_tpu_interpreter(options: dict) -> None:
    p = problem(H=1, HV=2, gate="weak", segments=True, **options)
    params = pltpu.InterpretParams(detect_races=True)
    assert_matches(interpreted(p, 16, params), expected(p), "float32")


@pytest.mark.parametrize("C", [16, 64, 256])
@pytest.mark.parametrize("precision", [HIGHEST, None], ids=["float32", "halves"])
def test_inverse_of_the_hardest_keys(C: int, precision: jax.lax.Precision | None) -> None:
    rng = np.random.default_rng(C)
    keys = rng.standard_normal((2, C, 64)) * np.array([1.0, 0.1])[:, None, None]
    keys[1] += 0.3  # nearly one direction
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    beta = 2 * rng.random((2, C, 1))
    L = np.tril(beta * (keys @ keys.swapaxes(1, 2)), -1).astype(np.float32)
    want = np.linalg.inv(np.eye(C) + L.astype(np.float64))
    got = jax.jit(tile.unit_lower_inverse, static_argnums=1)(jnp.asarray(L), precision)
    for x, y in zip(np.asarray(got, np.float64), want, strict=True):
        assert relative_rms(x, y) <= (1e-5 if precision is not None else 1e-3)


def transformed(p: Problem, transform) -> tuple[jax.Array, ...]:
    """Value and gradients of a loss through `transform` of the kernels as a function of arrays."""
    do, d_state = cotangents(p)

    def run(q, k, v, g, beta, state, reset):
        x = with_arrays(p, q=q, k=k, v=v, g=g, beta=beta, initial_state=state, reset=reset)
        return mosaic_tpu.chunkwise(x, 16, interpret=True)

    def loss(*arrays):
        o, state = transform(run)(*arrays, p.reset)
        return jnp.sum(o * do) + jnp.sum(state * d_state)

    arrays = (p.q, p.k, p.v, p.g, p.beta, p.initial_state)
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(6))))(*arrays)
    return value, *gradients


def scan_and_checkpoint(run):
    def rows(*arrays):
        one = jax.checkpoint(lambda row: run(*(x[None] for x in row)))
        _, (o, state) = jax.lax.scan(lambda carry, row: (carry, one(row)), 0.0, arrays)
        return o[:, 0], state[:, 0]

    return rows


def vmap_over_rows(run):
    def rows(*arrays):
        o, state = jax.vmap(run)(*(x[:, None] for x in arrays))
        return o[:, 0], state[:, 0]

    return rows


def shard_map_over_batch_and_heads(run):
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tokens, state = PartitionSpec("b", None, "h"), PartitionSpec("b", "h")
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(tokens,) * 5 + (state, PartitionSpec("b")),
        out_specs=(tokens, state),
    )


@functools.cache
def plain_results() -> tuple[Problem, tuple[jax.Array, ...]]:
    p = problem(T=40, gate="weak", segments=True)
    return p, transformed(p, lambda run: run)


@pytest.mark.parametrize(
    "transform", [scan_and_checkpoint, vmap_over_rows, shard_map_over_batch_and_heads]
)
def test_transforms_give_the_same_values_and_gradients(transform) -> None:
    if transform is shard_map_over_batch_and_heads and jax.device_count() < 4:
        pytest.skip("needs four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
    p, want = plain_results()
    for got, wanted in zip(transformed(p, transform), want, strict=True):
        assert relative_rms(np.asarray(got), np.asarray(wanted)) <= 1e-6


def test_shard_map_without_initial_state() -> None:
    if jax.device_count() < 4:
        pytest.skip("needs four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
    p = problem(T=20, state=False, delta=False)
    tokens = PartitionSpec("b", None, "h")

    def run(q, k, v):
        return mosaic_tpu.chunkwise(p.with_tokens(q=q, k=k, v=v), 16, interpret=True)

    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"in_specs": (tokens,) * 3, "out_specs": (tokens, PartitionSpec("b", "h"))}
    got = jax.jit(jax.shard_map(run, mesh=mesh, **specs))(p.q, p.k, p.v)
    for x, y in zip(got, run(p.q, p.k, p.v), strict=True):
        assert relative_rms(np.asarray(x), np.asarray(y)) <= 1e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"K": 24}, "head sizes"),
        ({"V": 40}, "head sizes"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_reasons_name_what_is_not_covered(options: dict, words: str) -> None:
    p = problem(T=5, **options)
    assert words in mosaic_tpu.why_not(p, None)
    with pytest.raises(NotImplementedError, match=words):
        mosaic_tpu.chunkwise(p)


def test_reasons_for_chunk_size_precision_and_abstract_arrays() -> None:
    p = problem(T=5)
    half = problem(T=5, dtype="bfloat16")
    assert mosaic_tpu.why_not(half, None) is None
    assert "precision" in mosaic_tpu.why_not(dataclasses.replace(half, precision=HIGHEST), None)
    assert "chunk size" in mosaic_tpu.why_not(p, 48)
    assert mosaic_tpu.why_not(jax.eval_shape(lambda: p), None) is None
