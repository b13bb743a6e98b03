"""Train a language model over a mesh of devices, of one process or of several.

The mesh has axes for data, FSDP, heads and context. Batches depend on the step alone, so a run
that was killed continues from its last checkpoint, on another mesh too.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from deltanet_jax.models.checkpoint import Checkpoints
from deltanet_jax.models.sharding import check_mesh, make_mesh, make_sharded, put_batch
from deltanet_jax.models.training import make_optimizer, train_step
from experiments.tasks.corpus import Corpus, prefetch

__all__ = ["TrainSharded", "run"]

Rows = tuple[np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class TrainSharded:
    """Train over a mesh with data, FSDP, head and context axes; resumes from its checkpoints."""

    data: int = 1
    """Mesh axis `data`: copies of the parameters."""
    fsdp: int = 1
    """Mesh axis `fsdp`: parts of every parameter."""
    heads: int = 1
    """Mesh axis `heads`: parts of the heads, the MLP and the vocabulary."""
    context: int = 1
    """Mesh axis `context`: parts of every sequence."""
    explicit: bool = False
    """Show the sharding of rows and tokens in the types of arrays."""
    steps: int = 20
    """Steps in all, those of a resumed run included."""
    batch: int = 8
    """Sequences per step."""
    tokens: int = 64
    """Tokens per sequence."""
    hidden_size: int = 32
    """Channels of the model."""
    num_heads: int = 4
    """Heads of every layer."""
    num_layers: int = 2
    """Layers."""
    vocab_size: int = 64
    """Size of the vocabulary."""
    corpus: Path | None = None
    """Corpus written by `python -m experiments pack-text`; patterns by default."""
    learning_rate: float = 1e-2
    """Highest learning rate."""
    implementation: str = "chunkwise"
    """Implementation of the operator, on every device."""
    checkpoints: Path | None = None
    """Where checkpoints are written after every step, and looked for at the start."""
    coordinator: str | None = None
    """host:port of the first process of several; each must be given its number."""
    num_processes: int = 1
    """Number of processes that run this together."""
    process_id: int = 0
    """Number of this process, from 0."""


def batch_of(options: TrainSharded, step: int) -> np.ndarray:
    """Sequences that repeat after a third of their length: a model with a memory learns them."""
    rng = np.random.default_rng(step)
    period = max(1, options.tokens // 3)
    part = rng.integers(0, options.vocab_size, (options.batch, period))
    return np.tile(part, (1, 4))[:, : options.tokens].astype(np.int32)


def source_of(options: TrainSharded) -> Callable[[int], Rows]:
    """Tokens and `segment_ids` of a step, which every process computes for itself.

    Raises:
        ValueError: If the corpus cannot be used, or has tokens outside the vocabulary.
    """
    if options.corpus is None:
        return lambda step: (batch_of(options, step), None)
    corpus = Corpus.open(options.corpus, options.tokens)
    if corpus.largest >= options.vocab_size:
        raise ValueError(
            f"`vocab_size` must be above the corpus's largest token {corpus.largest}; "
            f"got {options.vocab_size}"
        )
    return lambda step: corpus.batch(seed=0, step=step, batch_size=options.batch)


def config_of(options: TrainSharded) -> DeltaNetConfig:
    return DeltaNetConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        gate="scalar",
    )


def run(options: TrainSharded, *, stop: int | None = None) -> dict[int, float]:
    """Train; the loss of every step of this run, also written as it comes.

    Args:
        options: Options of the run; `steps` also sets the schedule of the learning rate.
        stop: Do not begin this step, nor any later one.
    """
    if options.coordinator is not None:
        jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id)
    config = config_of(options)
    mesh = make_mesh(
        data=options.data,
        fsdp=options.fsdp,
        heads=options.heads,
        context=options.context,
        explicit=options.explicit,
    )
    check_mesh(config, mesh, batch=options.batch, tokens=options.tokens)
    source = source_of(options)
    axis = "context" if options.context > 1 else None

    def create() -> tuple[DeltaNetLM, "nnx.Optimizer[DeltaNetLM]"]:
        model = DeltaNetLM(
            config, implementation=options.implementation, context_axis=axis, rngs=nnx.Rngs(0)
        )
        return model, make_optimizer(model, options.learning_rate, total_steps=options.steps)

    model, optimizer = make_sharded(create, mesh)
    if options.checkpoints is None:
        return _train(options, mesh, source, model, optimizer, None, stop)
    with Checkpoints(options.checkpoints) as checkpoints:
        return _train(options, mesh, source, model, optimizer, checkpoints, stop)


def _train(
    options: TrainSharded,
    mesh: jax.sharding.Mesh,
    source: Callable[[int], Rows],
    model: DeltaNetLM,
    optimizer: "nnx.Optimizer[DeltaNetLM]",
    checkpoints: Checkpoints | None,
    stop: int | None,
) -> dict[int, float]:
    first, losses = 0, {}
    if checkpoints is not None and checkpoints.latest_step() is not None:
        first = checkpoints.restore(model, optimizer)
    with jax.set_mesh(mesh):
        steps = range(first, options.steps if stop is None else stop)
        for step, batch in zip(steps, prefetch(source, steps), strict=True):
            tokens, segment_ids = (None if x is None else put_batch(x, mesh) for x in batch)
            losses[step] = float(train_step(model, optimizer, tokens, segment_ids)["loss"])
            if checkpoints is not None:
                checkpoints.save(step + 1, model, optimizer)
            # One short write a line: a reader of the pipe sees only complete steps.
            sys.stdout.write(f"step {step} loss {losses[step]:.7f}\n")
            sys.stdout.flush()
    return losses
