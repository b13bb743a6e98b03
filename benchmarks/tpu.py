"""Check and time the TPU kernels on a TPU: what compiling for one cannot show.

    python benchmarks/tpu.py                    correctness of every case, then the timing table
    python benchmarks/tpu.py --skip-timing
    python benchmarks/tpu.py --tiny             a rehearsal in the interpreter, on any machine

Correctness compares outputs, final state and every gradient with the recurrence in float64 on the
host, against the accuracy contract; a figure above it makes the exit status 1. Timing runs
`implementation="pallas"` beside `"chunkwise"` (plain XLA) in one process, interleaved.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax import compat, linear_attention

BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (6e-3, 1e-2)}
Arrays = dict[str, np.ndarray]

# name -> (B, T, H, HV, K, V), dtype, gate, delta rule, cosine of the keys, largest beta
CASES: dict[str, tuple[tuple[int, ...], str, str, bool, float, float]] = {
    "delta": ((2, 1000, 8, 8, 128, 128), "bfloat16", "none", True, 0.0, 1.0),
    "delta, alike keys": ((1, 1000, 8, 8, 128, 128), "bfloat16", "none", True, 0.9, 2.0),
    "gated, grouped, packed": ((2, 1000, 4, 8, 64, 128), "bfloat16", "scalar", True, 0.0, 1.0),
    "gated, no delta rule": ((1, 1000, 4, 4, 256, 64), "bfloat16", "scalar", False, 0.0, 1.0),
    "delta, float32": ((1, 500, 4, 4, 128, 128), "float32", "none", True, 0.9, 2.0),
    "gated, float32": ((1, 500, 4, 4, 64, 256), "float32", "scalar", True, 0.0, 1.0),
    "KDA": ((2, 1000, 8, 8, 128, 128), "bfloat16", "vector", True, 0.0, 1.0),
    "KDA, gates to -20": ((1, 500, 2, 4, 64, 128), "float32", "strong vector", True, 0.0, 1.0),
    "GLA": ((1, 1000, 4, 4, 256, 64), "bfloat16", "vector", False, 0.0, 1.0),
}
SHAPES = [(2, 4096, 8, 128), (1, 8192, 16, 128), (8, 2048, 16, 64), (2, 4096, 8, 256)]


def make_inputs(
    shape: tuple[int, ...], gate: str, delta: bool, cosine: float, largest_beta: float
) -> Arrays:
    """Unit keys with the given pairwise cosine; two segment boundaries where there is a gate."""
    B, T, H, HV, K, V = shape
    rng = np.random.default_rng(0)

    def unit(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    keys = np.sqrt(cosine) * unit(1, 1, H, K) + np.sqrt(1 - cosine) * unit(B, T, H, K)
    arrays = {
        "q": unit(B, T, H, K),
        "k": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        "v": rng.standard_normal((B, T, HV, V)),
        "initial_state": 0.3 * rng.standard_normal((B, HV, K, V)),
    }
    if delta:
        arrays["beta"] = largest_beta * rng.random((B, T, HV))
    if gate != "none":
        draw = rng.random((B, T, HV) if gate == "scalar" else (B, T, HV, K))
        arrays["g"] = -(20 if gate == "strong vector" else 0.05) * draw
        arrays["segment_ids"] = np.searchsorted([T // 3, T // 2], np.arange(T), side="right")
        arrays["segment_ids"] = np.repeat(arrays["segment_ids"][None], B, axis=0).astype(np.int32)
    return arrays


def values_and_gradients(arrays: Arrays, cotangents: Any, implementation: str) -> Arrays:
    """`o`, `state` and the gradient of every floating-point array, on the device of the arrays."""
    fixed = {n: x for n, x in arrays.items() if n == "segment_ids"}
    floats = {n: x for n, x in arrays.items() if n not in fixed}

    @jax.jit
    def pull(floats: Any, cotangents: Any) -> Any:
        outputs, vjp = jax.vjp(
            lambda x: linear_attention(**x, **fixed, implementation=implementation), floats
        )
        return outputs, vjp(jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, outputs))[0]

    (o, state), gradients = pull(floats, cotangents)
    named = {"o": o, "state": state} | {f"d{name}": x for name, x in gradients.items()}
    return {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in named.items()}


def check(name: str, tiny: bool) -> bool:
    """Print the errors of one case; whether all keep to the contract."""
    shape, dtype, *rest = CASES[name]
    if tiny:
        shape = (1, 80, 1, shape[3] // shape[2], 64, 64)
    arrays = make_inputs(shape, *rest)
    rounded = {
        n: jnp.asarray(x, dtype if n in ("q", "k", "v") else None if n == "segment_ids" else "f4")
        for n, x in arrays.items()
    }
    B, T, _, HV, K, V = shape
    rng = np.random.default_rng(1)
    do = jnp.asarray(rng.standard_normal((B, T, HV, V)), dtype)
    cotangents = (do, jnp.asarray(rng.standard_normal((B, HV, K, V)), jnp.float32))
    got = values_and_gradients(rounded, cotangents, "pallas")

    host = {n: np.asarray(x) for n, x in rounded.items()}
    seeds = tuple(np.asarray(c) for c in cotangents)
    with compat.enable_x64(), jax.default_device(jax.devices("cpu")[0]):
        wide = {n: jnp.asarray(x, None if n == "segment_ids" else "f8") for n, x in host.items()}
        seeds = tuple(jnp.asarray(c, "f8") for c in seeds)
        want = values_and_gradients(wide, seeds, "recurrent")
    errors = {n: float(np.linalg.norm(got[n] - want[n]) / np.linalg.norm(want[n])) for n in want}
    forward, gradient = BOUNDS[dtype]
    bounds = {n: forward if n in ("o", "state") else gradient for n in errors}
    fine = all(errors[n] <= bounds[n] for n in errors)
    figures = "  ".join(f"{n} {e:.1e}" for n, e in errors.items())
    print(f"{'ok  ' if fine else 'FAIL'} {name:24s} {dtype:9s} {figures}", flush=True)
    return fine


def timed(function: Callable[..., Any], arguments: tuple, calls: int) -> float:
    """Milliseconds per call of a compiled function, many calls in flight."""
    start = time.perf_counter()
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls * 1e3


def programs(shape: tuple[int, int, int, int]) -> tuple[dict, tuple]:
    """The compiled programs of a shape, by (mode, implementation), and their arguments."""
    B, T, H, D = shape
    arrays = make_inputs((B, T, H, H, D, D), "none", True, 0.0, 1.0)
    q, k, v = (jnp.asarray(arrays[n], jnp.bfloat16) for n in ("q", "k", "v"))
    beta = jnp.asarray(arrays["beta"], jnp.float32)
    found = {}
    for implementation in ("pallas", "chunkwise"):

        def forward(q: Any, k: Any, v: Any, beta: Any, implementation: str = implementation) -> Any:
            return linear_attention(q, k, v, beta=beta, implementation=implementation)

        def training(*arrays: Any, forward: Callable[..., Any] = forward) -> Any:
            outputs, vjp = jax.vjp(forward, *arrays)
            return outputs, vjp(outputs)

        for mode, function in (("forward", forward), ("forward+backward", training)):
            found[mode, implementation] = jax.jit(function).lower(q, k, v, beta).compile()
    return found, (q, k, v, beta)


def time_shapes(shapes: list[tuple[int, int, int, int]], rounds: int, calls: int) -> None:
    """Print the median of interleaved rounds, after one round that is not counted."""
    print("\n| (B, T, H, D) | mode | pallas ms | chunkwise ms | chunkwise / pallas |")
    print("|---|---|---|---|---|")
    for shape in shapes:
        compiled, arguments = programs(shape)
        samples: dict = {key: [] for key in compiled}
        for _ in range(rounds + 1):
            for key, function in compiled.items():
                samples[key].append(timed(function, arguments, calls))
        medians = {key: statistics.median(times[1:]) for key, times in samples.items()}
        for mode in ("forward", "forward+backward"):
            ours, xla = medians[mode, "pallas"], medians[mode, "chunkwise"]
            print(f"| {shape} | {mode} | {ours:.3f} | {xla:.3f} | {xla / ours:.2f} |", flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--skip-timing", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small shapes; runs without a TPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    platform = jax.default_backend()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {jax.device_count()} device(s)")
    if platform != "tpu" and not options.tiny:
        print(f"this needs a TPU and runs on {platform}; --tiny rehearses it in the interpreter")
        return 2
    results = [check(name, options.tiny) for name in CASES]
    if not options.skip_timing and all(results):
        shapes = [(1, 80, 1, 64)] if options.tiny else SHAPES
        time_shapes(shapes, 1 if options.tiny else options.rounds, options.calls)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
