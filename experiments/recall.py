"""Multi-query associative recall: how much a memory of so many numbers gives back.

Pairs, then every key again (Arora et al., 2023, arXiv:2312.04927). All models are one shape:
mixers without MLPs, whose memories are equally large and differ in their rule. The memory
of softmax attention grows with the tokens; it is the ceiling. Training mixes the numbers of
pairs, as the later settings of that paper's code do; the test takes them one by one.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import Progress

from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from experiments import figures
from experiments.models import MEMORIES, make_model, memory_floats
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
from experiments.tasks.recall import draw_recall, longest_list

__all__ = ["PRESETS", "Recall", "run"]

EXPERIMENT = "recall"


@dataclass(frozen=True)
class Recall(ModelSweep):
    """Recall of pairs by memories of equal size: softmax, sums, delta rules."""

    rates: tuple[float, ...] = (1e-2,)
    steps: int = 600
    block: int = 50
    batch_size: int = 16
    memories: tuple[str, ...] = ("delta", "gated-delta", "linear", "gated-linear", "softmax")
    """Models, in the order of training."""
    hidden_sizes: tuple[int, ...] = (16,)
    """Channels."""
    pairs: tuple[int, ...] = (2, 4, 8, 16)
    """Numbers of pairs; a sequence of training has any of them."""
    length: int = 64
    """Tokens of a sequence."""
    vocab_size: int = 64
    """Size of the vocabulary, half of it keys and half values."""
    heads: int = 1
    """Heads."""
    layers: int = 1
    """Blocks."""
    conv_size: int = 4
    """Taps of the short convolutions, by which a value finds its key."""
    test_sequences: int = 64
    """Sequences of the test for each seed and number of pairs."""


PRESETS = {
    "cpu": Recall(),
    "gpu": Recall(
        preset="gpu",
        rates=(3e-3, 1e-2),
        steps=2000,
        block=100,
        batch_size=64,
        hidden_sizes=(64, 32, 128),
        pairs=(8, 16, 32, 64, 96),
        length=384,
        vocab_size=512,
        heads=2,
        test_sequences=128,
    ),
}


def make_case(options: Recall, hidden_size: int, memory: str) -> Case:
    """One model of one size."""
    config = DeltaNetConfig(
        vocab_size=options.vocab_size,
        hidden_size=hidden_size,
        num_layers=options.layers,
        num_heads=options.heads,
        conv_size=options.conv_size,
        mlp_size=1,
        dtype=options.dtype,
    )
    pairs = jnp.asarray(options.pairs)

    def loss(model: DeltaNetLM, key: jax.Array, _: jax.Array) -> jax.Array:
        streams = jax.random.split(key)
        counts = jax.random.choice(streams[0], pairs, (options.batch_size,))
        tokens, values = draw_recall(streams[1], options.length, options.vocab_size, counts)
        return cross_entropy(model(tokens), values)[0]

    def measure(model: DeltaNetLM, key: jax.Array, _: jax.Array) -> dict[str, jax.Array]:
        def accuracy(count: jax.Array) -> jax.Array:
            counts = jnp.full((options.test_sequences,), count)
            tokens, values = draw_recall(key, options.length, options.vocab_size, counts)
            return cross_entropy(model(tokens), values)[1]

        found = jax.lax.map(accuracy, pairs)
        return {"accuracy": found, "mean": found.mean()}

    def make(rngs: nnx.Rngs) -> DeltaNetLM:
        return make_model(config, memory, rngs, implementation=options.implementation, mlp=False)

    key = {"hidden_size": hidden_size, "memory": memory}
    return Case(key, make, loss, measure)


def cases(options: Recall) -> list[Case]:
    """All that is trained, size by size.

    Raises:
        ValueError: If there is no such memory, or there are too many pairs for a sequence.
    """
    check_names("memories", options.memories, MEMORIES)
    most = longest_list(options.length, options.vocab_size)
    if not 1 <= min(options.pairs) <= max(options.pairs) <= most:
        raise ValueError(
            f"`pairs` must be 1 to {most} for length={options.length} and "
            f"vocab_size={options.vocab_size}; got {options.pairs}"
        )
    return [make_case(options, d, name) for d in options.hidden_sizes for name in options.memories]


def run(options: Recall) -> int:
    """Train, and write the record, the table and the figure."""
    return run_sweep(EXPERIMENT, options, _train, _finish)


def _train(options: Recall, record: Run, bar: Progress) -> None:
    train_all(options, record, bar, cases(options))


def results(record: Run) -> dict[tuple[int, str], list[Row]]:
    """For every size and memory the lanes of the best rate."""
    return {
        (row["hidden_size"], row["memory"]): best_rate(row["lanes"], "mean")
        for row in record.select(kind="result")
    }


def _floats(options: Recall, hidden_size: int, memory: str) -> int:
    config = DeltaNetConfig(
        vocab_size=options.vocab_size,
        hidden_size=hidden_size,
        num_layers=options.layers,
        num_heads=options.heads,
    )
    return memory_floats(config, memory, options.length)


def _finish(options: Recall, record: Run) -> None:
    found = results(record)
    rows = [
        {
            "hidden_size": size,
            "memory": memory,
            "floats": _floats(options, size, memory),
            "pairs": count,
            **{name: lane[name] for name in ("seed", "rate")},
            "accuracy": lane["accuracy"][i],
        }
        for (size, memory), lanes in found.items()
        for lane in lanes
        for i, count in enumerate(options.pairs)
    ]
    record.write_table(rows)
    for size in dict.fromkeys(size for size, _ in found):
        cells = [
            [figures.MEMORIES[memory].label, _floats(options, size, memory)]
            + [spread(lane["accuracy"][i] for lane in lanes) for i in range(len(options.pairs))]
            for (s, memory), lanes in found.items()
            if s == size
        ]
        columns = ["fraction right", "floats", *(f"{n} pairs" for n in options.pairs)]
        title = f"{size} channels, {options.heads} head(s): mean, least and greatest over seeds"
        console.print(make_table(title, columns, cells))
    with figures.style():
        figures.save(draw(options, found), record.directory, "recall")


def draw(options: Recall, found: dict[tuple[int, str], list[Row]]) -> Figure:
    """Accuracy against the number of pairs for each size, and against the size of the memory."""
    sizes = sorted({size for size, _ in found})
    panels = len(sizes) + (len(sizes) > 1)
    columns = panels if panels < 4 else 2
    fig, axes = figures.figure(-(-panels // columns), columns, panel=(3.5, 2.6), sharey=True)
    for ax, size in zip(axes.flat, sizes, strict=False):
        for memory in options.memories:
            if (size, memory) in found:
                look = figures.MEMORIES[memory]
                values = [lane["accuracy"] for lane in found[size, memory]]
                figures.spread_line(ax, options.pairs, np.transpose(values), look)
        figures.powers_of_two_axis(ax, "pairs N", options.pairs)
        width = size // options.heads
        if options.pairs[0] <= width <= options.pairs[-1]:
            ax.axvline(width, color="black", ls="--", lw=0.9)
            ax.annotate("N = head dim", (width, 0), xytext=(-3, 3), fontsize=7.5, ha="right",
                        textcoords="offset points")  # fmt: skip
        ax.set(title=f"{size} channels, {_floats(options, size, 'delta')} floats of state")
    if len(sizes) > 1:
        _draw_sizes(axes.flat[panels - 1], options, found)
    for ax in list(axes.flat)[panels:]:
        ax.set_visible(False)
    for ax in axes.flat:
        ax.set(ylim=(0, 1.05))
    for ax in axes[:, 0]:
        ax.set(ylabel="fraction right")
    figures.letter(axes.flat)
    handles = {label: handle for ax in axes.flat
               for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}  # fmt: skip
    fig.legend(handles.values(), handles.keys(), loc="outside lower center",
               ncols=min(3, columns + 1))  # fmt: skip
    return fig


def _draw_sizes(ax: figures.Axes, options: Recall, found: dict[tuple[int, str], list[Row]]) -> None:
    """Accuracy at the greatest number of pairs; the cache of softmax is the largest memory."""
    for memory in options.memories:
        sizes = sorted(size for size, name in found if name == memory)
        floats = [_floats(options, size, memory) for size in sizes]
        values = [[lane["accuracy"][-1] for lane in found[size, memory]] for size in sizes]
        if sizes:
            figures.spread_line(ax, floats, values, figures.MEMORIES[memory])
    ax.set(xscale="log", xlabel="floats that the memory keeps")
    ax.set(title=f"{options.pairs[-1]} pairs, all sizes")
