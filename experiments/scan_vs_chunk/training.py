"""One language model trained three times: the layers differ, nothing else does."""

import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from flax import nnx
from rich.progress import Progress

from deltanet_jax import AssociativeDeltaNet, ChunkwiseDeltaNet, RecurrentDeltaNet
from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from deltanet_jax.models.training import make_optimizer, train_step
from experiments.checkpoint import load, save
from experiments.record import Row, Run
from experiments.scan_vs_chunk.options import ScanVsChunk
from experiments.tasks.text import Text, batch, read_text

__all__ = ["ARMS", "REFERENCE", "agreement", "losses", "train"]

LAYERS = (RecurrentDeltaNet, AssociativeDeltaNet, ChunkwiseDeltaNet)
ARMS: dict[str, str] = {layer.__name__: layer.implementation for layer in LAYERS}
REFERENCE = RecurrentDeltaNet.__name__

Step = Callable[[nnx.State, jax.Array], tuple[nnx.State, jax.Array]]


def model_config(options: ScanVsChunk) -> DeltaNetConfig:
    """A byte-level model."""
    return DeltaNetConfig(
        vocab_size=256,
        hidden_size=options.width,
        num_layers=options.layers,
        num_heads=options.train_heads,
    )


def start(options: ScanVsChunk, arm: str) -> tuple[nnx.State, Step]:
    """Model and optimiser before the first step as one pytree, and the step as a pure function.

    Every arm's model is given the parameters of the reference arm.
    """
    config = model_config(options)
    model, reference = (
        DeltaNetLM(config, implementation=ARMS[name], rngs=nnx.Rngs(options.seed))
        for name in (arm, REFERENCE)
    )
    nnx.update(model, nnx.state(reference))
    optimizer = make_optimizer(
        model,
        options.learning_rate,
        total_steps=max(options.steps, 2),
        warmup_steps=min(10, options.steps // 2),
    )
    graph, state = nnx.split((model, optimizer))

    def step(state: nnx.State, tokens: jax.Array) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss = train_step(model, optimizer, tokens)["loss"]
        return nnx.state((model, optimizer)), loss

    return state, step


def train(options: ScanVsChunk, record: Run, bar: Progress) -> None:
    """Every arm that the record does not have whole; an unfinished one goes on."""
    text = read_text(options.text, options.text_bytes)
    _note_text(record, text)
    for arm in ARMS:
        task = bar.add_task(f"train {ARMS[arm]}", total=options.steps, note="compiling")
        if record.find(kind="arm", arm=arm) is not None:
            bar.update(task, completed=options.steps, note="in the record")
            continue
        report = partial(bar.update, task)
        row = _train_arm(options, arm, text, record, report)
        record.write({"kind": "arm", "arm": arm, **row})
        (record.directory / _checkpoint_name(arm)).unlink(missing_ok=True)


def _note_text(record: Run, text: Text) -> None:
    """What is trained on; a resumed run must find the same bytes."""
    noted = record.find(kind="text")
    if noted is None:
        record.write({"kind": "text", "source": text.source, "bytes": len(text.data),
                      "sha256": text.sha256})  # fmt: skip
    elif noted["sha256"] != text.sha256:
        raise ValueError("the text is not the one this run started with; start a new run")


def _train_arm(
    options: ScanVsChunk, arm: str, text: Text, record: Run, report: Callable[..., None]
) -> Row:
    """Train from the last checkpoint, or from the start; a row per step."""
    state, step = start(options, arm)
    path = record.directory / _checkpoint_name(arm)
    state, first = load(path, state)
    draw = partial(
        batch, text, seed=options.seed,
        batch_size=options.train_batch, length=options.train_length,
    )  # fmt: skip
    begin = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, draw(step=0)).compile()
    compile_seconds = time.perf_counter() - begin
    for index in range(first, options.steps):
        begin = time.perf_counter()
        state, loss = compiled(state, draw(step=index))
        value = float(loss)
        seconds = time.perf_counter() - begin
        record.write(
            {"kind": "train", "arm": arm, "step": index, "loss": value, "seconds": seconds}
        )
        if (index + 1) % options.checkpoint_every == 0:
            save(path, state, index + 1)
        report(advance=1, completed=index + 1, note=f"loss {value:.3f}")
    # The first call of a compiled step also pays for first use of its memory.
    times = [row["seconds"] for row in steps_of(record, arm)][1:] or [seconds]
    return {
        "compile_seconds": compile_seconds,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "tokens_per_second": options.train_batch * options.train_length / np.median(times),
        "last_loss": value,
    }


def _checkpoint_name(arm: str) -> str:
    return f"checkpoint-{ARMS[arm]}.npz"


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
