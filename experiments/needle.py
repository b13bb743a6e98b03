"""A needle in a haystack that grows: what a memory keeps while it reads on.

One marked pair of a key and a value somewhere in tokens that do not matter, and the question
at the end. Trained at one length and read at others. After the two haystacks of the retrieval
tasks in Yang et al. (2024, arXiv:2412.06464): a memory that only decays loses the needle with
time whatever comes after it; a memory without decay keeps it, as long as what comes after
does not fill it.
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
from experiments.models import MEMORIES, make_model
from experiments.record import Row, Run
from experiments.sweep import Case, Sweep, best_rate, cross_entropy, run_sweep, spread, train_all
from experiments.tables import console, make_table
from experiments.tasks.needle import SHORTEST, draw_needles

__all__ = ["PRESETS", "Needle", "run"]

EXPERIMENT = "needle"
HAYSTACKS = {"repeated": "repeated pattern", "random": "random tokens"}


@dataclass(frozen=True)
class Needle(Sweep):
    """A needle in repeated and in random tokens: gate and delta rule, longer than in training."""

    rates: tuple[float, ...] = (1e-2,)
    steps: int = 600
    block: int = 50
    batch_size: int = 32
    memories: tuple[str, ...] = ("delta", "gated-delta", "gated-linear")
    """Models, in the order of training."""
    length: int = 64
    """Tokens of a sequence in training."""
    test_lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Tokens of the sequences of the test."""
    depths: int = 5
    """Places of the needle in the test, from the first to the last."""
    test_sequences: int = 16
    """Sequences of the test for each seed, haystack, length and depth."""
    vocab_size: int = 32
    """Tokens that there are."""
    hidden_size: int = 32
    """Channels."""
    heads: int = 2
    """Heads."""
    layers: int = 1
    """Blocks."""
    conv_size: int = 4
    """Taps of the short convolutions, by which a value finds its key and its mark."""


PRESETS = {
    "cpu": Needle(),
    "gpu": Needle(
        preset="gpu",
        rates=(3e-3, 1e-2),
        steps=3000,
        block=100,
        batch_size=64,
        memories=("delta", "gated-delta", "gated-linear", "softmax"),
        length=256,
        test_lengths=(128, 256, 512, 1024, 2048),
        depths=9,
        test_sequences=32,
        vocab_size=64,
        hidden_size=64,
        layers=2,
    ),
}


def make_case(options: Needle, memory: str) -> Case:
    """One model, trained on both haystacks."""
    config = DeltaNetConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        num_heads=options.heads,
        conv_size=options.conv_size,
        mlp_size=options.hidden_size,
    )
    lengths, depths = jnp.asarray(options.test_lengths), jnp.linspace(0, 1, options.depths)
    places = [x.ravel() for x in jnp.meshgrid(lengths, depths, indexing="ij")]

    def loss(model: DeltaNetLM, key: jax.Array, _: jax.Array) -> jax.Array:
        streams = jax.random.split(key)
        tokens, values = draw_needles(
            streams[0],
            options.batch_size,
            options.length,
            options.vocab_size,
            length=options.length,
            depth=jax.random.uniform(streams[1], (options.batch_size,)),
            repeated=jnp.arange(options.batch_size) % 2 == 0,
        )
        return cross_entropy(model(tokens)[:, -1], values)[0]

    def measure(model: DeltaNetLM, key: jax.Array, _: jax.Array) -> dict[str, jax.Array]:
        batch = len(HAYSTACKS) * options.test_sequences
        repeated = jnp.arange(batch) < options.test_sequences

        def read(place: tuple[jax.Array, jax.Array]) -> jax.Array:
            length, depth = place
            tokens, values = draw_needles(
                key,
                batch,
                max(options.test_lengths),
                options.vocab_size,
                length=length,
                depth=depth,
                repeated=repeated,
            )
            # What follows the question cannot change its answer: one program for all lengths.
            right = jnp.argmax(model(tokens)[:, length - 1], axis=-1) == values
            return right.reshape(len(HAYSTACKS), -1).mean(1)

        found = jax.lax.map(read, tuple(places))  # [lengths * depths, haystacks]
        shape = (len(options.test_lengths), options.depths)
        accuracy = dict(zip(HAYSTACKS, found.T.reshape(-1, *shape), strict=True))
        return accuracy | {"mean": found.mean()}

    def make(rngs: nnx.Rngs) -> DeltaNetLM:
        return make_model(config, memory, rngs)

    return Case({"memory": memory}, make, loss, measure)


def cases(options: Needle) -> list[Case]:
    """All that is trained.

    Raises:
        ValueError: If there is no such memory, or a sequence has no room for its needle.
    """
    unknown = set(options.memories) - set(MEMORIES)
    if unknown:
        raise ValueError(
            f"`memories` must be among {', '.join(MEMORIES)}; got {', '.join(unknown)}"
        )
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


def results(record: Run) -> dict[str, list[Row]]:
    """For every memory the lanes of its best rate."""
    return {row["memory"]: best_rate(row["lanes"], "mean") for row in record.select(kind="result")}


def _finish(options: Needle, record: Run) -> None:
    found = results(record)
    depths = np.linspace(0, 1, options.depths)
    rows = [
        {
            "memory": memory,
            "haystack": haystack,
            **{name: lane[name] for name in ("seed", "rate")},
            "length": length,
            "depth": depth,
            "accuracy": lane[haystack][i][j],
        }
        for memory, lanes in found.items()
        for lane in lanes
        for haystack in HAYSTACKS
        for i, length in enumerate(options.test_lengths)
        for j, depth in enumerate(depths)
    ]
    record.write_table(rows)
    for haystack, title in HAYSTACKS.items():
        cells = [
            [figures.MEMORIES[memory].label]
            + [spread(values) for values in np.transpose(_by_length(lanes, haystack))]
            for memory, lanes in found.items()
        ]
        columns = ["fraction right", *(f"T = {n}" for n in options.test_lengths)]
        title = f"{title}, trained at {options.length}: mean, least and greatest over seeds"
        console.print(make_table(title, columns, cells))
    with figures.style():
        figures.save(draw(options, found), record.directory, "needle")


def _by_length(lanes: list[Row], haystack: str) -> np.ndarray:
    """`[seeds, lengths]`: means over depths."""
    return np.asarray([lane[haystack] for lane in lanes]).mean(-1)


def draw(options: Needle, found: dict[str, list[Row]]) -> Figure:
    """Accuracy against length for both haystacks; below it, against length and depth."""
    fig = Figure(figsize=(7.2, 4.6), layout="constrained")
    above, below = fig.subfigures(2, 1, height_ratios=(1.15, 1))
    lines = above.subplots(1, 2, sharey=True)
    for ax, (haystack, title) in zip(lines, HAYSTACKS.items(), strict=True):
        for memory, lanes in found.items():
            values = np.transpose(_by_length(lanes, haystack))
            figures.spread_line(ax, options.test_lengths, values, figures.MEMORIES[memory])
        figures.powers_of_two_axis(ax, "tokens", options.test_lengths)
        ax.axvline(options.length, color="black", ls="--", lw=0.9)
        ax.set(title=title, ylim=(0, 1.05))
    lines[0].annotate("training", (options.length, 0), xytext=(3, 3), fontsize=7.5,
                      textcoords="offset points")  # fmt: skip
    lines[0].set(ylabel="fraction right")
    above.legend(*lines[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    maps = below.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for ax, (memory, lanes) in zip(maps, found.items(), strict=True):
        image = _draw_depths(ax, options, np.mean([lane["random"] for lane in lanes], axis=0))
        ax.set(title=figures.MEMORIES[memory].label)
    maps[0].set(ylabel="depth of the needle")
    below.colorbar(image, ax=maps, label="fraction right\n(random tokens)")
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
