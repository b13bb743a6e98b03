"""The operators measured: time, memory and error of each implementation."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from deltanet_jax import linear_attention, why_not
from deltanet_jax.compat import enable_x64
from deltanet_jax.core import reference
from experiments.machine import available_memory
from experiments.record import Row, Run
from experiments.scan_vs_chunk.costs import Cost, Sizes, predict
from experiments.scan_vs_chunk.options import ScanVsChunk
from experiments.tables import human_bytes

__all__ = ["DIRECTIONS", "IMPLEMENTATIONS", "Case", "cases", "measure", "memory_budget"]

# Label in the record: name in the library, and the chunk size where the form's default is none.
IMPLEMENTATIONS: dict[str, tuple[str, int | None]] = {
    "recurrent": ("recurrent", None),
    "associative": ("associative", None),
    "associative_chunked": ("associative", 64),
    "chunkwise": ("chunkwise", 64),
    "chunkwise_solve": ("chunkwise_solve", 64),
    "pallas": ("pallas", 64),
}
CHUNKED = ("associative_chunked", "chunkwise", "chunkwise_solve")
DIRECTIONS = ("forward", "forward+backward")

Arrays = dict[str, jax.Array]


class Case(NamedTuple):
    """One row of the measurement; `C` is `None` for the forms over tokens."""

    implementation: str
    direction: str
    T: int
    d: int
    C: int | None


def cases(options: ScanVsChunk) -> list[Case]:
    """The three sweeps, each case once; what is wanted most comes first."""
    d, chunks = options.head_dim, {name: C for name, (_, C) in IMPLEMENTATIONS.items()}
    lengths = [(name, T, d, C) for T in options.lengths for name, C in chunks.items()]
    T = options.head_sweep_length
    heads = [(name, T, width, C) for width in options.head_dims for name, C in chunks.items()]
    T = options.chunk_sweep_length
    sizes = [(name, T, d, C) for C in options.chunk_sizes for name in CHUNKED]
    ways = DIRECTIONS if options.sweep_forward else DIRECTIONS[1:]
    wanted = [Case(name, way, *rest) for name, *rest in lengths for way in DIRECTIONS]
    wanted += [Case(name, way, *rest) for name, *rest in heads + sizes for way in ways]
    return list(dict.fromkeys(wanted))


def memory_budget(options: ScanVsChunk) -> float:
    """Bytes that one case may take."""
    if options.memory_budget is not None:
        return options.memory_budget * 1e9
    statistics = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return 0.9 * (statistics["bytes_limit"] - statistics.get("bytes_in_use", 0))
    return 0.5 * available_memory()


@functools.lru_cache(maxsize=2)
def inputs(options: ScanVsChunk, T: int, d: int) -> tuple[Arrays, tuple[jax.Array, jax.Array]]:
    """What a layer would pass: unit queries and keys, beta in (0, 1), mild decay; cotangents."""
    rng = np.random.default_rng([options.seed, T, d])
    B, H = options.batch_size, options.heads
    q, k, v, weights = rng.standard_normal((4, B, T, H, d))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    dtype = jnp.dtype(options.dtype)
    arrays = {name: jnp.asarray(x, dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    arrays["beta"] = jnp.asarray(1 / (1 + np.exp(-rng.standard_normal((B, T, H)))), jnp.float32)
    if options.gate != "none":
        shape = (B, T, H) if options.gate == "scalar" else (B, T, H, d)
        arrays["g"] = jnp.asarray(-0.1 * rng.exponential(size=shape), jnp.float32)
    state_weights = jnp.asarray(rng.standard_normal((B, H, d, d)), jnp.float32)
    return arrays, (jnp.asarray(weights, dtype), state_weights)


@functools.lru_cache(maxsize=2)
def oracle(options: ScanVsChunk, T: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and state of the first sequence and head in float64, of the first tokens."""
    arrays, _ = inputs(options, T, d)
    kept = {name: np.asarray(x[:1, : options.oracle_tokens, :1], np.float64)
            for name, x in arrays.items()}  # fmt: skip
    return reference.recurrence(**kept)


@functools.lru_cache(maxsize=2)
def exact_gradients(options: ScanVsChunk, T: int, d: int) -> dict[str, np.ndarray]:
    """Gradients of the recurrence, computed in float64."""
    with enable_x64():
        arrays, weights = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x, np.float64)), inputs(options, T, d)
        )
        out = jax.jit(functools.partial(_both, implementation="recurrent", C=None))(arrays, weights)
        return jax.tree.map(np.asarray, out[1])


def _forward(arrays: Arrays, *, implementation: str, C: int | None) -> tuple[jax.Array, jax.Array]:
    return linear_attention(**arrays, implementation=implementation, chunk_size=C)


def _both(
    arrays: Arrays, weights: tuple[jax.Array, jax.Array], *, implementation: str, C: int | None
) -> tuple[tuple[jax.Array, jax.Array], Arrays]:
    """Outputs, and the gradients for given cotangents of outputs and state."""
    call = functools.partial(_forward, implementation=implementation, C=C)
    out, pull = jax.vjp(call, arrays)
    return out, pull(weights)[0]


def relative_rms(x: np.ndarray, exact: np.ndarray) -> float:
    """`rms(x - exact) / rms(exact)`."""
    difference = np.asarray(x, np.float64) - exact
    return float(np.sqrt(np.square(difference).mean() / np.square(exact).mean()))


def measure(options: ScanVsChunk, record: Run, bar: Progress) -> None:
    """Every case that the record does not have yet."""
    budget = memory_budget(options)
    todo = cases(options)
    task = bar.add_task("operators", total=len(todo), note="")
    for case in todo:
        key = {"kind": "operator", **case._asdict()}
        bar.update(task, note=f"{case.implementation} {case.direction} T={case.T} d={case.d}")
        if record.find(**key) is None:
            record.write(key | measure_case(options, case, budget))
        bar.advance(task)
    bar.update(task, note="")


def measure_case(options: ScanVsChunk, case: Case, budget: float) -> Row:
    """One case, or why it was not run."""
    C = case.C or 1
    size = jnp.dtype(options.dtype).itemsize
    sizes = Sizes(options.batch_size, case.T, options.heads, case.d, case.d, C, size)
    backward = case.direction == "forward+backward"
    cost = predict(case.implementation, sizes, backward=backward)
    row = _predicted(cost)
    reason = _reason_against(options, case)
    if reason is not None:
        return row | {"status": "not here", "reason": reason}
    if cost.temporary_bytes > budget:
        needs = human_bytes(cost.temporary_bytes)
        return row | {"status": "does not fit", "reason": f"predicted {needs}"}
    name = IMPLEMENTATIONS[case.implementation][0]
    arrays, weights = inputs(options, case.T, case.d)
    function = _both if backward else _forward
    arguments = (arrays, weights) if backward else (arrays,)
    begin = time.perf_counter()
    whole = jax.jit(functools.partial(function, implementation=name, C=case.C))
    compiled = whole.lower(*arguments).compile()
    row["compile_seconds"] = time.perf_counter() - begin
    row["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    if row["temporary_bytes"] > budget:
        needs = human_bytes(row["temporary_bytes"])
        return row | {"status": "does not fit", "reason": f"the compiler wants {needs}"}
    times, out = _time(compiled, arguments, options)
    low, middle, high = np.percentile(times, [25, 50, 75])
    row |= {"seconds": middle, "seconds_q25": low, "seconds_q75": high, "calls": len(times)}
    return row | _errors(options, case, out, backward=backward) | {"status": "measured"}


def _predicted(cost: Cost) -> Row:
    return {
        "predicted_flops": cost.flops,
        "predicted_bytes": cost.bytes_moved,
        "predicted_temporary_bytes": cost.temporary_bytes,
        "serial_steps": cost.serial_steps,
    }


def _reason_against(options: ScanVsChunk, case: Case) -> str | None:
    """Why a case cannot be measured on this machine."""
    name = IMPLEMENTATIONS[case.implementation][0]
    if name != "pallas":
        return None
    platform = jax.default_backend()
    if platform not in ("gpu", "tpu"):
        return f"the kernels need a GPU or a TPU; this is a {platform}"
    B, T, H, d = options.batch_size, case.T, options.heads, case.d
    x = jax.ShapeDtypeStruct((B, T, H, d), jnp.dtype(options.dtype))
    gates = {"beta": jax.ShapeDtypeStruct((B, T, H), jnp.float32)}
    if options.gate != "none":
        shape = (B, T, H) if options.gate == "scalar" else (B, T, H, d)
        gates["g"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return why_not(name, x, x, x, **gates, chunk_size=case.C)


def _time(
    compiled: Callable[..., object], arguments: tuple[object, ...], options: ScanVsChunk
) -> tuple[list[float], object]:
    """Times of calls after one to warm up, each waited for; and the result of the last."""
    out = jax.block_until_ready(compiled(*arguments))
    times: list[float] = []
    while len(times) < options.repeats:
        if len(times) >= 3 and sum(times) > options.case_seconds:
            break
        del out
        begin = time.perf_counter()
        out = jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - begin)
    return times, out


def _errors(options: ScanVsChunk, case: Case, out: object, *, backward: bool) -> Row:
    """Relative rms errors against float64: of outputs and state, and the worst of the gradients."""
    if backward:
        if options.gradient_tokens < case.T:
            return {}
        exact = exact_gradients(options, case.T, case.d)
        return {"error_gradient": max(relative_rms(out[1][name], exact[name]) for name in exact)}
    o, state = oracle(options, case.T, case.d)
    tokens = o.shape[1]
    errors = {"error_output": relative_rms(out[0][:1, :tokens, :1], o), "error_tokens": tokens}
    if tokens == case.T:
        errors["error_state"] = relative_rms(out[1][:1, :1], state)
    return errors
