"""One language model trained three times: the layers differ, nothing else does."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from rich.progress import Progress

from deltanet_jax import AssociativeDeltaNet, ChunkwiseDeltaNet, RecurrentDeltaNet
from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from deltanet_jax.models.training import make_optimizer, train_step
from experiments.checkpoint import load, save
from experiments.compiling import compile_ahead, cpu_optimization
from experiments.record import Row, Run
from experiments.scan_vs_chunk.options import ScanVsChunk
from experiments.tasks.text import Text, batch, note_text, read_text

__all__ = ["ARMS", "REFERENCE", "agreement", "losses", "train"]

LAYERS = (RecurrentDeltaNet, AssociativeDeltaNet, ChunkwiseDeltaNet)
ARMS: dict[str, str] = {layer.__name__: layer.implementation for layer in LAYERS}
REFERENCE = RecurrentDeltaNet.__name__

LARGE = "large "  # the large model's arms are called this and their implementation

Step = Callable[[nnx.State, jax.Array], tuple[nnx.State, jax.Array]]


class Plan(NamedTuple):
    """One training."""

    config: DeltaNetConfig
    implementation: str
    steps: int
    batch_size: int
    length: int


class Ready(NamedTuple):
    """A training before its first step."""

    state: nnx.State
    step: Step
    compile_seconds: float
    temporary_bytes: int


def plans(options: ScanVsChunk) -> dict[str, Plan]:
    """Models to train: a small byte-level one by every layer, a large one for speed."""
    small = DeltaNetConfig(
        vocab_size=256,
        hidden_size=options.width,
        num_layers=options.layers,
        num_heads=options.train_heads,
    )
    large = DeltaNetConfig(
        vocab_size=256,
        hidden_size=options.large_width,
        num_layers=options.large_layers,
        num_heads=options.large_heads,
        dtype="bfloat16",
    )
    of_small = (options.steps, options.train_batch, options.train_length)
    of_large = (options.large_steps, options.large_batch, options.large_length)
    return {
        **{arm: Plan(small, name, *of_small) for arm, name in ARMS.items()},
        **{f"{LARGE}{name}": Plan(large, name, *of_large) for name in options.large_arms},
    }


def start(options: ScanVsChunk, plan: Plan) -> tuple[nnx.State, Step]:
    """Model and optimiser before the first step as one pytree, and the step as a pure function.

    Models of one config start from the same parameters: from one seed.
    """
    model = DeltaNetLM(plan.config, implementation=plan.implementation, rngs=nnx.Rngs(options.seed))
    optimizer = make_optimizer(
        model,
        options.learning_rate,
        total_steps=max(plan.steps, 2),
        warmup_steps=min(10, plan.steps // 2),
    )
    graph, state = nnx.split((model, optimizer))

    def step(state: nnx.State, tokens: jax.Array) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss = train_step(model, optimizer, tokens)["loss"]
        return nnx.state((model, optimizer)), loss

    return state, step


def _prepare(options: ScanVsChunk, plan: Plan) -> Ready:
    state, step = start(options, plan)
    tokens = jax.ShapeDtypeStruct((plan.batch_size, plan.length), np.int32)
    # Some accelerators round the operands of float32 products; the forms would round differently.
    exact = "highest" if plan.config.compute_dtype == np.float32 else None
    with jax.default_matmul_precision(exact):
        compiled, seconds = compile_ahead(
            step,
            state,
            tokens,
            compiler_options=cpu_optimization(options.optimization_level),
            donate_argnums=0,
        )
    return Ready(state, compiled, seconds, compiled.memory_analysis().temp_size_in_bytes)


def train(options: ScanVsChunk, record: Run, bar: Progress) -> None:
    """Train every arm that the record lacks, and continue an unfinished one."""
    text = read_text(options.text, options.text_bytes)
    note_text(record, text)
    todo = plans(options)
    missing = [arm for arm in todo if record.find(kind="arm", arm=arm) is None]
    ready: dict[str, Future[Ready]] = {}
    if options.threads:
        with ThreadPoolExecutor(options.threads) as pool:
            ready = {arm: pool.submit(_prepare, options, todo[arm]) for arm in missing}
    for arm, plan in todo.items():
        name = arm if arm.startswith(LARGE) else plan.implementation
        task = bar.add_task(f"train {name}", total=plan.steps, note="compiling")
        if arm not in missing:
            bar.update(task, completed=plan.steps, note="in the record")
            continue
        prepared = ready.pop(arm).result() if arm in ready else _prepare(options, plan)
        report = partial(bar.update, task)
        row = _train_arm(options, arm, plan, prepared, text, record, report)
        record.write({"kind": "arm", "arm": arm, **row})
        (record.directory / _checkpoint_name(arm)).unlink(missing_ok=True)


def _train_arm(
    options: ScanVsChunk,
    arm: str,
    plan: Plan,
    ready: Ready,
    text: Text,
    record: Run,
    report: Callable[..., None],
) -> Row:
    """Train from the last checkpoint, or from the start; a row per step."""
    path = record.directory / _checkpoint_name(arm)
    count = sum(x.size for x in jax.tree.leaves(ready.state[0]))
    state, first = load(path, ready.state)
    draw = partial(batch, text, seed=options.seed, batch_size=plan.batch_size, length=plan.length)
    for index in range(first, plan.steps):
        begin = time.perf_counter()
        state, loss = ready.step(state, draw(step=index))
        value = float(loss)
        seconds = time.perf_counter() - begin
        record.write(
            {"kind": "train", "arm": arm, "step": index, "loss": value, "seconds": seconds}
        )
        if (index + 1) % options.checkpoint_every == 0 and index + 1 < plan.steps:
            save(path, state, index + 1)
        report(advance=1, completed=index + 1, note=f"loss {value:.3f}")
    # The first call of a compiled step also pays for first use of its memory.
    times = [row["seconds"] for row in steps_of(record, arm)][1:] or [seconds]
    return {
        "parameters": count,
        "compile_seconds": ready.compile_seconds,
        "temporary_bytes": ready.temporary_bytes,
        "tokens_per_second": plan.batch_size * plan.length / np.median(times),
        "last_loss": value,
    }


def _checkpoint_name(arm: str) -> str:
    return f"checkpoint-{ARMS.get(arm, arm).replace(' ', '-')}.npz"


def steps_of(record: Run, arm: str) -> list[Row]:
    """One row per step, in order; of a step that was repeated after a kill, the last."""
    rows = {row["step"]: row for row in record.select(kind="train", arm=arm)}
    return [rows[step] for step in sorted(rows)]


def losses(record: Run) -> dict[str, np.ndarray]:
    """The losses of each arm that has any."""
    found = {arm: [row["loss"] for row in steps_of(record, arm)] for arm in ARMS}
    return {arm: np.asarray(values, float) for arm, values in found.items() if values}


def agreement(record: Run, tolerance: float) -> list[Row]:
    """The greatest difference of each arm's loss from the reference's, and the verdict."""
    curves = losses(record)
    if REFERENCE not in curves:
        return []
    rows = []
    for arm, curve in curves.items():
        steps = min(len(curve), len(curves[REFERENCE]))
        difference = np.abs(curve[:steps] - curves[REFERENCE][:steps])
        worst = float(difference.max())
        rows.append(
            {
                "arm": arm,
                "steps": steps,
                "largest_loss_difference": worst,
                "at_step": int(difference.argmax()),
                "tolerance": tolerance,
                "agrees": bool(worst <= tolerance),  # a NaN does not
            }
        )
    return rows
