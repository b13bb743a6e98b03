"""The options of the ablation, and its presets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["PRESETS", "ScanVsChunk"]


@dataclass(frozen=True)
class ScanVsChunk:
    """The forms of one recurrence against each other: operators, then training on real text.

    Operators: time, memory and error of every implementation against T, head size and chunk
    size. Training: one language model from one set of parameters on one sequence of batches,
    once with each of the three layers; the losses must agree, speed and memory differ.
    """

    preset: Literal["cpu", "gpu"] = "cpu"
    """Where the defaults below come from; every one of them can be set beside it."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Continue this run directory with its own options, except `operator_seconds`."""
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """Where run directories go."""
    name: str | None = None
    """Name of the run directory; the time by default."""
    seed: int = 0
    """Seed of inputs, parameters and batches."""
    memory_budget: float | None = None
    """GB that one case may take; by default half of this machine's free memory, or 0.9 of the
    accelerator's. Cases predicted to need more are listed and not run."""

    operators: bool = True
    """Measure the operators."""
    gate: Literal["none", "scalar", "vector"] = "none"
    """Which variant with the delta rule: DeltaNet, Gated DeltaNet or KDA."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the operators' q, k and v."""
    batch_size: int = 1
    """Sequences per call of an operator."""
    heads: int = 1
    """Heads per call of an operator."""
    lengths: tuple[int, ...] = (64, 256, 1024)
    """T of the sweep over T, at `head_dim` and each implementation's default chunk."""
    head_dim: int = 64
    """K = V of the sweeps over T and over chunk sizes."""
    head_dims: tuple[int, ...] = (64, 128)
    """K = V of the sweep over head sizes."""
    head_sweep_length: int = 64
    """T of the sweep over head sizes."""
    chunk_sizes: tuple[int, ...] = (16, 64, 128)
    """C of the sweep over chunk sizes."""
    chunk_sweep_length: int = 256
    """T of the sweep over chunk sizes."""
    sweep_forward: bool = False
    """Measure the forward pass alone in all sweeps, and not only over T."""
    repeats: int = 15
    """Timed calls of a case, at most."""
    case_seconds: float = 0.4
    """Time after which a case is called no more, once it has three calls."""
    once_above: float = 20.0
    """Seconds of a case's first call above which it is called only that once."""
    ratio_lengths: tuple[int, ...] = ()
    """T of the sweep at a fixed number of tokens a call, of every head size."""
    ratio_tokens: int = 16384
    """Tokens a call of that sweep: shorter sequences, more of them."""
    ratio_width: int = 2048
    """Channels of that sweep: larger heads, fewer of them."""
    operator_seconds: float | None = None
    """Seconds after which no other operator is begun; `--resume` takes what is left."""
    threads: int = 0
    """Threads that compile all cases of a sweep before it is timed, and all models before they
    are trained; with 0 each is compiled when its turn comes."""
    optimization_level: int | None = None
    """XLA's, of code for a CPU, from 0 to 3; by default XLA's own. Level 1 compiles in three
    quarters of the time, and no form is slower with it: their products are library calls."""
    oracle_tokens: int = 4096
    """The float64 oracle covers the outputs of this many tokens, of one head."""
    gradient_tokens: int = 64
    """T up to which gradients are compared with those of the recurrence in float64."""

    training: bool = True
    """Train the language models."""
    text: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE...")] = ()
    """Text to train on; by default the source of this Python's standard library."""
    text_bytes: int = 4_000_000
    """Bytes of the text to use, at most."""
    steps: int = 40
    """Steps of training per layer."""
    train_batch: int = 4
    """Sequences per step."""
    train_length: int = 128
    """Bytes per sequence."""
    width: int = 64
    """Channels of the model."""
    layers: int = 2
    """Blocks of the model."""
    train_heads: int = 2
    """Heads of each mixer."""
    learning_rate: float = 3e-3
    """Learning rate of AdamW, after 10 steps of warm-up."""
    loss_tolerance: float = 1e-4
    """Nats by which the losses of one step may differ between layers."""
    checkpoint_every: int = 20
    """Steps between checkpoints of training."""
    large_arms: tuple[str, ...] = ()
    """Implementations that train a large model in bfloat16 for its speed."""
    large_width: int = 768
    """Its channels."""
    large_layers: int = 14
    """Its blocks."""
    large_heads: int = 6
    """Its heads."""
    large_batch: int = 16
    """Sequences per step."""
    large_length: int = 2048
    """Bytes per sequence."""
    large_steps: int = 50
    """Steps of it."""


PRESETS = {
    "cpu": ScanVsChunk(threads=2, optimization_level=1),
    "gpu": ScanVsChunk(
        preset="gpu",
        dtype="bfloat16",
        heads=16,
        lengths=(1024, 4096, 16384, 131072),
        head_dim=128,
        head_dims=(64, 128, 256),
        head_sweep_length=4096,
        chunk_sizes=(16, 64, 128, 256),
        chunk_sweep_length=16384,
        ratio_lengths=(512, 2048, 16384),
        repeats=20,
        case_seconds=0.25,
        once_above=0.8,
        oracle_tokens=512,
        gradient_tokens=0,
        threads=16,
        text_bytes=8_000_000,
        steps=60,
        train_batch=8,
        train_length=512,
        width=256,
        layers=4,
        train_heads=4,
        learning_rate=1e-3,
        loss_tolerance=1e-3,
        checkpoint_every=50,
        large_arms=("pallas", "chunkwise"),
    ),
}
