"""A needle in a haystack that grows: what a memory keeps while it reads on.

One pair of a key and a value somewhere in tokens that do not matter, and the question at the
end. Trained at one length and read at others. After the two haystacks of the retrieval tasks
in Yang et al. (2024, arXiv:2412.06464): a pattern that repeats adds to a sum for ever and
changes nothing in a memory that corrects; random tokens fill any memory, unless a mark says
what to keep. Each haystack has models of its own, trained side by side; where there is no mark
they are asked in training, besides the question, what followed every token when it came last.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import Progress

from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from experiments import figures
from experiments.models import MEMORIES, make_model
from experiments.record import Row, Run
from experiments.sweep import (
    Case,
    ModelSweep,
    best_rate,
    check_names,
    cross_entropy,
    run_sweep,
    spread,
    train_all,
)
from experiments.tables import console, make_table
from experiments.tasks.needle import SHORTEST, draw_needles, followers

__all__ = ["PRESETS", "Needle", "run"]

EXPERIMENT = "needle"


class Haystack(NamedTuple):
    """The text that the needle lies in."""

    repeated: bool
    marked: bool
    title: str


HAYSTACKS = {
    "repeated": Haystack(True, False, "repeated pattern"),
    "random": Haystack(False, False, "random tokens"),
    "marked": Haystack(False, True, "random tokens, needle marked"),
}
MAPPED = "random"  # the haystack whose heat maps are drawn


@dataclass(frozen=True)
class Needle(ModelSweep):
    """A needle in repeated and in random tokens: gate and delta rule, longer than in training."""

    rates: tuple[float, ...] = (1e-2,)
    steps: int = 350
    block: int = 50
    batch_size: int = 16
    memories: tuple[str, ...] = ("delta", "gated-delta")
    """Models, in the order of training."""
    length: int = 16
    """Tokens of a sequence in training."""
    test_lengths: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Tokens of the sequences of the test."""
    depths: int = 5
    """Places of the needle in the test, from the first to the last."""
    test_sequences: int = 8
    """Sequences of the test for each seed, haystack, length and depth."""
    vocab_size: int = 10
    """Size of the vocabulary."""
    hidden_size: int = 32
    """Channels."""
    heads: int = 1
    """Heads."""
    layers: int = 1
    """Blocks."""
    conv_size: int = 4
    """Taps of the short convolutions, by which a value finds its key and its mark."""


# Fewer tokens than a head has key channels: of 127 tokens and heads of 32, or of 31 and heads of
# 16, DeltaNet learned no pair of the random haystack.
PRESETS = {
    "cpu": Needle(),
    # Heads of 64 in bfloat16 are what kernels take.
    "gpu": Needle(
        preset="gpu",
        rates=(3e-3, 1e-2),
        steps=3000,
        block=100,
        memories=("delta", "gated-delta", "gated-linear", "linear", "softmax"),
        length=256,
        test_lengths=(128, 256, 512, 1024, 2048),
        depths=9,
        test_sequences=16,
        batch_size=32,
        vocab_size=32,
        hidden_size=128,
        heads=2,
        layers=2,
        dtype="bfloat16",
    ),
}


def make_case(options: Needle, memory: str) -> Case:
    """One model, on every haystack side by side."""
    config = DeltaNetConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        num_heads=options.heads,
        conv_size=options.conv_size,
        mlp_size=options.hidden_size,
        dtype=options.dtype,
    )
    lengths, depths = jnp.asarray(options.test_lengths), jnp.linspace(0, 1, options.depths)
    places = tuple(x.ravel() for x in jnp.meshgrid(lengths, depths, indexing="ij"))
    repeated = jnp.asarray([haystack.repeated for haystack in HAYSTACKS.values()])
    marked = jnp.asarray([haystack.marked for haystack in HAYSTACKS.values()])

    def draw(key: jax.Array, variant: jax.Array, batch: int, longest: int, **where: Any) -> Any:
        kind = {"repeated": repeated[variant], "marked": marked[variant]}
        return draw_needles(key, batch, longest, options.vocab_size, **kind, **where)

    def loss(model: DeltaNetLM, key: jax.Array, variant: jax.Array) -> jax.Array:
        streams, batch, length = jax.random.split(key), options.batch_size, options.length
        depth = jax.random.uniform(streams[1], (batch,))
        tokens, values = draw(streams[0], variant, batch, length, length=length, depth=depth)
        logits = model(tokens)
        asked = cross_entropy(logits[:, -1], values)[0]
        # One question a sequence is too little to find out what is asked without a mark.
        hints = cross_entropy(logits[:, :-1], followers(tokens)[:, :-1])[0]
        return asked + jnp.where(marked[variant], 0.0, hints)

    def measure(model: DeltaNetLM, key: jax.Array, variant: jax.Array) -> dict[str, jax.Array]:
        batch, longest = options.test_sequences, max(options.test_lengths)

        def read(place: tuple[jax.Array, jax.Array]) -> jax.Array:
            length, depth = place
            tokens, values = draw(key, variant, batch, longest, length=length, depth=depth)
            # What follows the question cannot change its answer: one program for all lengths.
            return jnp.mean(jnp.argmax(model(tokens)[:, length - 1], axis=-1) == values)

        accuracy = jax.lax.map(read, places).reshape(len(lengths), options.depths)
        return {"accuracy": accuracy, "mean": accuracy.mean()}

    def make(rngs: nnx.Rngs) -> DeltaNetLM:
        return make_model(config, memory, rngs, implementation=options.implementation)

    variants = tuple({"haystack": name} for name in HAYSTACKS)
    return Case({"memory": memory}, make, loss, measure, variants)


def cases(options: Needle) -> list[Case]:
    """All that is trained.

    Raises:
        ValueError: If there is no such memory, or a sequence has no room for its needle.
    """
    check_names("memories", options.memories, MEMORIES)
    shortest = min(options.length, *options.test_lengths)
    if shortest < SHORTEST:
        raise ValueError(
            f"`length` and `test_lengths` must be at least {SHORTEST}, needle and question; "
            f"got {shortest}"
        )
    return [make_case(options, memory) for memory in options.memories]


def run(options: Needle) -> int:
    """Train, and write the record, the table and the figure."""
    return run_sweep(EXPERIMENT, options, _train, _finish)


def _train(options: Needle, record: Run, bar: Progress) -> None:
    train_all(options, record, bar, cases(options))


def results(record: Run) -> dict[str, dict[str, list[Row]]]:
    """For every memory and haystack the lanes of the best rate."""
    return {
        row["memory"]: {
            haystack: best_rate(
                [lane for lane in row["lanes"] if lane["haystack"] == haystack], "mean"
            )
            for haystack in HAYSTACKS
        }
        for row in record.select(kind="result")
    }


def _finish(options: Needle, record: Run) -> None:
    found = results(record)
    rows = [
        {
            "memory": memory,
            **{name: lane[name] for name in ("haystack", "seed", "rate")},
            "length": length,
            "depth": depth,
            "accuracy": lane["accuracy"][i][j],
        }
        for memory, lanes_of in found.items()
        for lanes in lanes_of.values()
        for lane in lanes
        for i, length in enumerate(options.test_lengths)
        for j, depth in enumerate(np.linspace(0, 1, options.depths))
    ]
    record.write_table(rows)
    for name, haystack in HAYSTACKS.items():
        cells = [
            [figures.MEMORIES[memory].label]
            + [spread(values) for values in _by_length(lanes_of[name])]
            for memory, lanes_of in found.items()
        ]
        columns = ["fraction right", *(f"T = {n}" for n in options.test_lengths)]
        of_seeds = f"trained at {options.length}: mean, least and greatest over seeds"
        console.print(make_table(f"{haystack.title}, {of_seeds}", columns, cells))
    with figures.style():
        figures.save(draw(options, found), record.directory, "needle")


def _by_length(lanes: list[Row]) -> np.ndarray:
    """`[lengths, seeds]`: means over depths."""
    return np.asarray([lane["accuracy"] for lane in lanes]).mean(-1).T


def draw(options: Needle, found: dict[str, dict[str, list[Row]]]) -> Figure:
    """Accuracy against length for each haystack; below it, against length and depth."""
    fig = Figure(figsize=(max(8.6, 2.25 * len(found)), 4.8), layout="constrained")
    above, below = fig.subfigures(2, 1, height_ratios=(1.2, 1))
    lines = above.subplots(1, len(HAYSTACKS), sharey=True)
    for ax, (name, haystack) in zip(lines, HAYSTACKS.items(), strict=True):
        for memory, lanes_of in found.items():
            values, look = _by_length(lanes_of[name]), figures.MEMORIES[memory]
            figures.spread_line(ax, options.test_lengths, values, look)
        figures.powers_of_two_axis(ax, "tokens", options.test_lengths)
        ax.axvline(options.length, color="black", ls="--", lw=0.9, label="length in training")
        ax.set(title=haystack.title, ylim=(0, 1.05))
    lines[0].set(ylabel="fraction right")
    handles, labels = lines[0].get_legend_handles_labels()
    above.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    maps = below.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for ax, (memory, lanes_of) in zip(maps, found.items(), strict=True):
        mean = np.mean([lane["accuracy"] for lane in lanes_of[MAPPED]], axis=0)
        image = _draw_depths(ax, options, mean)
        ax.set(title=figures.MEMORIES[memory].label)
    maps[0].set(ylabel="depth of the needle")
    below.colorbar(image, ax=maps, label=f"fraction right\n({HAYSTACKS[MAPPED].title})")
    figures.letter([*lines, *maps])
    return fig


def _draw_depths(ax: figures.Axes, options: Needle, accuracy: np.ndarray) -> object:
    """A heat map of lengths and depths."""
    image = ax.imshow(accuracy.T, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    ticks = np.arange(len(options.test_lengths))
    ax.set_xticks(ticks, [str(n) for n in options.test_lengths])
    last = options.depths - 1
    ax.set_yticks([0, last / 2, last], ["first", "middle", "last"])
    ax.set(xlabel="tokens")
    ax.grid(visible=False)
    return image
