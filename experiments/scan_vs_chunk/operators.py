"""The operators measured: time, memory and error of each implementation."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress, TaskID

from deltanet_jax import linear_attention
from deltanet_jax.compat import enable_x64
from deltanet_jax.core import reference
from experiments.compiling import compile_ahead, cpu_optimization
from experiments.machine import available_memory
from experiments.record import Row, Run
from experiments.scan_vs_chunk.costs import Cost, Sizes, predict
from experiments.scan_vs_chunk.implementations import CHUNKED, IMPLEMENTATIONS
from experiments.scan_vs_chunk.options import ScanVsChunk
from experiments.tables import human_bytes

__all__ = ["DIRECTIONS", "Case", "cases", "measure", "memory_budget"]

DIRECTIONS = ("forward", "forward+backward")

Arrays = dict[str, jax.Array]


class Case(NamedTuple):
    """One row of the measurement; `C` is `None` for the forms over tokens."""

    implementation: str
    direction: str
    B: int
    T: int
    H: int
    d: int
    C: int | None


class Prepared(NamedTuple):
    """A case before it is timed: what is known of it, and its program if it can run."""

    row: Row
    program: Callable[..., object] | None


def sweeps(options: ScanVsChunk) -> list[list[Case]]:
    """The sweeps over T, at a fixed number of tokens, and over sizes; each case once.

    Raises:
        ValueError: If the sweep at a fixed number of tokens has a case without sequences or heads.
    """
    if options.ratio_lengths and (
        max(options.ratio_lengths) > options.ratio_tokens
        or max(options.head_dims) > options.ratio_width
    ):
        raise ValueError(
            f"`ratio_lengths` must be at most ratio_tokens={options.ratio_tokens} and `head_dims` "
            f"at most ratio_width={options.ratio_width}; got {options.ratio_lengths} and "
            f"{options.head_dims}"
        )
    chunks = {name: entry.chunk_size for name, entry in IMPLEMENTATIONS.items()}
    B, H, d = options.batch_size, options.heads, options.head_dim
    ways = DIRECTIONS if options.sweep_forward else DIRECTIONS[1:]
    lengths = [
        Case(name, way, B, T, H, d, C)
        for T in options.lengths for name, C in chunks.items() for way in DIRECTIONS
    ]  # fmt: skip
    ratios = [
        Case(name, way, options.ratio_tokens // T, T, options.ratio_width // width, width, C)
        for T in options.ratio_lengths for width in options.head_dims
        for name, C in chunks.items() for way in ways
    ]  # fmt: skip
    T = options.head_sweep_length
    heads = [(name, B, T, H, width, C) for width in options.head_dims for name, C in chunks.items()]
    T = options.chunk_sweep_length
    sizes = [(name, B, T, H, d, C) for C in options.chunk_sizes for name in CHUNKED]
    others = [Case(name, way, *rest) for name, *rest in heads + sizes for way in ways]
    seen: set[Case] = set()
    return [
        [case for case in dict.fromkeys(sweep) if case not in seen and not seen.add(case)]
        for sweep in (lengths, ratios, others)
    ]


def cases(options: ScanVsChunk) -> list[Case]:
    """The cases of all sweeps in order."""
    return [case for sweep in sweeps(options) for case in sweep]


def memory_budget(options: ScanVsChunk) -> float:
    """Bytes that one case may take."""
    if options.memory_budget is not None:
        return options.memory_budget * 1e9
    statistics = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return 0.9 * (statistics["bytes_limit"] - statistics.get("bytes_in_use", 0))
    return 0.5 * available_memory()


@functools.lru_cache(maxsize=2)
@functools.partial(jax.jit, static_argnums=range(5))
def inputs(
    options: ScanVsChunk, B: int, T: int, H: int, d: int
) -> tuple[Arrays, tuple[jax.Array, jax.Array]]:
    """Draw layer-like inputs: unit queries and keys, beta in (0, 1), mild decay; and cotangents."""
    keys = jax.random.split(jax.random.key(options.seed), 7)
    normal = functools.partial(jax.random.normal, dtype=jnp.float32)
    q, k, v, weights = (normal(key, (B * T * H * d,)).reshape(B, T, H, d) for key in keys[:4])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    dtype = jnp.dtype(options.dtype)
    arrays = {name: x.astype(dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    arrays["beta"] = jax.nn.sigmoid(normal(keys[4], (B, T, H)))
    if options.gate != "none":
        shape = (B, T, H) if options.gate == "scalar" else (B, T, H, d)
        arrays["g"] = -0.1 * jax.random.exponential(keys[5], shape, jnp.float32)
    return arrays, (weights.astype(dtype), normal(keys[6], (B, H, d, d)))


@functools.lru_cache(maxsize=2)
def oracle(options: ScanVsChunk, B: int, T: int, H: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and state of the first sequence and head in float64, of the first tokens."""
    arrays, _ = inputs(options, B, T, H, d)
    kept = {name: np.asarray(x[:1, : options.oracle_tokens, :1], np.float64)
            for name, x in arrays.items()}  # fmt: skip
    return reference.recurrence(**kept)


@functools.lru_cache(maxsize=2)
def exact_gradients(options: ScanVsChunk, B: int, T: int, H: int, d: int) -> dict[str, np.ndarray]:
    """Gradients of the recurrence, computed in float64."""
    given = inputs(options, B, T, H, d)
    with enable_x64():
        arrays, weights = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), given)
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
    if record.find(kind="budget") is None:
        record.write({"kind": "budget", "bytes": budget})
    task = bar.add_task("operators", total=len(cases(options)), note="")
    limit = float("inf") if options.operator_seconds is None else options.operator_seconds
    end = time.perf_counter() + limit
    for sweep in sweeps(options):
        if time.perf_counter() > end:
            break
        missing = [c for c in sweep if record.find(kind="operator", **c._asdict()) is None]
        bar.advance(task, len(sweep) - len(missing))
        ready = _compile_all(options, missing, budget, task, bar) if options.threads else {}
        for case in missing:
            if time.perf_counter() > end:
                break
            bar.update(task, note=f"{case.implementation} {case.direction} T={case.T} d={case.d}")
            row = measure_case(options, case, budget, ready.pop(case, None))
            record.write({"kind": "operator", **case._asdict()} | row)
            bar.advance(task)
    bar.update(task, note="")


def _compile_all(
    options: ScanVsChunk, missing: list[Case], budget: float, task: TaskID, bar: Progress
) -> dict[Case, Prepared]:
    """Compile all before the first is timed, so that nothing runs beside a timing."""
    with ThreadPoolExecutor(options.threads) as pool:
        waiting = {case: pool.submit(prepare, options, case, budget) for case in missing}
        try:
            for done, _ in enumerate(as_completed(waiting.values()), 1):
                bar.update(task, note=f"compiled {done} of {len(missing)}")
        finally:  # an interrupt does not wait for those that have not begun
            pool.shutdown(wait=False, cancel_futures=True)
        return {case: future.result() for case, future in waiting.items()}


def prepare(options: ScanVsChunk, case: Case, budget: float) -> Prepared:
    """Predict and compile a case, or say why it is not run; needs no arrays."""
    cost = predict(case.implementation, sizes_of(options, case), backward=_is_backward(case))
    row = _predicted(cost)
    reason = _reason_against(options, case)
    if reason is not None:
        return Prepared(row | {"status": "not here", "reason": reason}, None)
    if cost.temporary_bytes > budget:
        needs = human_bytes(cost.temporary_bytes)
        return Prepared(row | {"status": "does not fit", "reason": f"predicted {needs}"}, None)
    name = IMPLEMENTATIONS[case.implementation].name
    function = _both if _is_backward(case) else _forward
    shapes = jax.eval_shape(functools.partial(inputs.__wrapped__, options, *case[2:6]))
    whole = functools.partial(function, implementation=name, C=case.C)
    try:
        arguments = shapes[: 1 + _is_backward(case)]
        program, seconds = compile_ahead(
            whole, *arguments, compiler_options=cpu_optimization(options.optimization_level)
        )
    except jax.errors.JaxRuntimeError as error:
        return Prepared(row | _failure(error), None)
    row["compile_seconds"] = seconds
    row["compile_threads"] = options.threads
    row["temporary_bytes"] = program.memory_analysis().temp_size_in_bytes
    if row["temporary_bytes"] > budget:
        needs = human_bytes(row["temporary_bytes"])
        wants = {"status": "does not fit", "reason": f"the compiler wants {needs}"}
        return Prepared(row | wants, None)
    return Prepared(row, program)


def measure_case(
    options: ScanVsChunk, case: Case, budget: float, prepared: Prepared | None = None
) -> Row:
    """One case, or why it was not run."""
    row, program = prepared or prepare(options, case, budget)
    if program is None:
        return row
    arguments = inputs(options, *case[2:6])[: 1 + _is_backward(case)]
    try:
        times, out = _time(program, arguments, options)
    except jax.errors.JaxRuntimeError as error:
        return row | _failure(error)
    low, middle, high = np.percentile(times, [25, 50, 75])
    row |= {"seconds": middle, "seconds_q25": low, "seconds_q75": high, "calls": len(times)}
    return row | _errors(options, case, out) | {"status": "measured"}


def _failure(error: jax.errors.JaxRuntimeError) -> Row:
    """Return the row of a case that the device refuses; the others continue."""
    text = str(error)
    status = "does not fit" if "RESOURCE_EXHAUSTED" in text else "failed"
    return {"status": status, "reason": text.partition("\n")[0][:200]}


def _is_backward(case: Case) -> bool:
    return case.direction == DIRECTIONS[1]


def sizes_of(options: ScanVsChunk, case: Case) -> Sizes:
    size = jnp.dtype(options.dtype).itemsize
    return Sizes(case.B, case.T, case.H, case.d, case.d, case.C or 1, size)


def _predicted(cost: Cost) -> Row:
    return {
        "predicted_flops": cost.flops,
        "predicted_bytes": cost.bytes_moved,
        "predicted_temporary_bytes": cost.temporary_bytes,
        "serial_steps": cost.serial_steps,
    }


def _reason_against(options: ScanVsChunk, case: Case) -> str | None:
    """Why a case cannot be measured on this machine."""
    name = IMPLEMENTATIONS[case.implementation].name
    _, _, B, T, H, d, _ = case
    x = jax.ShapeDtypeStruct((B, T, H, d), jnp.dtype(options.dtype))
    gates = {"beta": jax.ShapeDtypeStruct((B, T, H), jnp.float32)}
    if options.gate != "none":
        shape = (B, T, H) if options.gate == "scalar" else (B, T, H, d)
        gates["g"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    # As a candidate, kernels count on their hardware alone: the interpreter is not timed.
    call = functools.partial(linear_attention, implementation=(name,), chunk_size=case.C)
    try:
        jax.eval_shape(call, x, x, x, **gates)
    except NotImplementedError as error:
        return str(error).partition(f"{name!r}: ")[2]
    return None


def _time(
    compiled: Callable[..., object], arguments: tuple[object, ...], options: ScanVsChunk
) -> tuple[list[float], object]:
    """Times of calls after one to warm up, each waited for; and the result of the last."""
    begin = time.perf_counter()
    out = jax.block_until_ready(compiled(*arguments))
    first = time.perf_counter() - begin
    if first > options.once_above:
        return [first], out
    times: list[float] = []
    while len(times) < options.repeats:
        if len(times) >= 3 and sum(times) > options.case_seconds:
            break
        del out
        begin = time.perf_counter()
        out = jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - begin)
    return times, out


def _errors(options: ScanVsChunk, case: Case, out: object) -> Row:
    """Relative rms errors against float64: of outputs and state, and the worst of the gradients."""
    if _is_backward(case):
        if options.gradient_tokens < case.T:
            return {}
        exact = exact_gradients(options, *case[2:6])
        return {"error_gradient": max(relative_rms(out[1][name], exact[name]) for name in exact)}
    o, state = oracle(options, *case[2:6])
    tokens = o.shape[1]
    errors = {"error_output": relative_rms(out[0][:1, :tokens, :1], o), "error_tokens": tokens}
    if tokens == case.T:
        errors["error_state"] = relative_rms(out[1][:1, :1], state)
    return errors
