"""The figures of the ablation."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import figures
from experiments.figures import PALETTE
from experiments.record import Row, Run
from experiments.scan_vs_chunk.operators import DIRECTIONS, IMPLEMENTATIONS
from experiments.scan_vs_chunk.options import ScanVsChunk
from experiments.scan_vs_chunk.training import ARMS, REFERENCE, losses

__all__ = ["draw_all"]

LOOKS = {
    "recurrent": ("black", "o"),
    "associative": ("red", "s"),
    "associative_chunked": ("orange", "D"),
    "chunkwise": ("blue", "^"),
    "chunkwise_solve": ("sky", "v"),
    "pallas": ("green", "P"),
}
NAMES = {
    "associative": "associative (tokens)",
    "associative_chunked": "associative (chunks)",
    "chunkwise": "chunkwise (WY)",
    "chunkwise_solve": "chunkwise (solve)",
    "pallas": "Pallas kernel",
}


def draw_all(options: ScanVsChunk, record: Run) -> list[Path]:
    """Every figure that the record has rows for."""
    measured = record.select(kind="operator", status="measured")
    drawn = {}
    with figures.style():
        if any(row["T"] in options.lengths for row in measured):
            drawn["against_length"] = draw_lengths(options, measured)
        if measured:
            drawn["against_sizes"] = draw_sizes(options, measured)
        if losses(record):
            drawn["training"] = draw_training(options, record)
        return [p for name, fig in drawn.items() for p in figures.save(fig, record.directory, name)]


def _line(ax: Axes, rows: Sequence[Row], x: str, y: str, name: str) -> None:
    """One implementation; the spread of times as bars."""
    rows = sorted(rows, key=lambda row: row[x])
    color, marker = LOOKS[name]
    xs, ys = ([row[key] for row in rows] for key in (x, y))
    look = {"color": PALETTE[color], "marker": marker, "label": NAMES.get(name, name)}
    if y != "seconds":
        ax.plot(xs, ys, **look)
        return
    low, high = (np.asarray([row[key] for row in rows]) for key in ("seconds_q25", "seconds_q75"))
    ax.errorbar(xs, ys, [ys - low, high - ys], capsize=1.5, elinewidth=0.8, **look)


def _default_chunks(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["C"] == IMPLEMENTATIONS[row["implementation"]][1]]


def _sweep(ax: Axes, rows: Sequence[Row], x: str, y: str) -> None:
    for name in IMPLEMENTATIONS:
        mine = [row for row in rows if row["implementation"] == name and row.get(y)]
        if mine:
            _line(ax, mine, x, y, name)


def draw_lengths(options: ScanVsChunk, measured: Sequence[Row]) -> Figure:
    """Time and memory against T; proportional growth is the dashed line."""
    fig, axes = figures.figure(2, 2, panel=(3.5, 2.75), sharex=True)
    rows = [r for r in _default_chunks(measured)
            if r["d"] == options.head_dim and r["T"] in options.lengths]  # fmt: skip
    for row, (y, unit) in enumerate((("seconds", figures.seconds_axis),
                                     ("temporary_bytes", figures.bytes_axis))):  # fmt: skip
        for ax, direction in zip(axes[row], DIRECTIONS, strict=True):
            mine = [r for r in rows if r["direction"] == direction]
            _sweep(ax, mine, "T", y)
            unit(ax, "time per call" if y == "seconds" else "temporary memory")
            figures.powers_of_two_axis(ax, "tokens T" if row else "", options.lengths)
            ax.set_title(direction.replace("+", " + "))
            _guides(ax, options, mine, y)
    figures.letter(axes.flat)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    d = options.head_dim
    fig.suptitle(
        f"One call of the delta rule: B = {options.batch_size}, H = {options.heads}, "
        f"d = {d}, {options.dtype}",
        fontsize=9.5,
    )
    return fig


def _guides(ax: Axes, options: ScanVsChunk, rows: Sequence[Row], y: str) -> None:
    """Slope 1 below the data, and in the memory panels what a token's maps weigh."""
    values = [row[y] for row in rows if row.get(y)]
    if not values or len(options.lengths) < 2:
        return
    figures.slope_guide(ax, options.lengths, min(values) / 2.5, 1, "slope 1", place=0.55)
    if y != "temporary_bytes" or "associative" not in {row["implementation"] for row in rows}:
        return
    maps = [4 * options.batch_size * options.heads * T * 2 * options.head_dim**2
            for T in options.lengths]  # fmt: skip
    ax.plot(options.lengths, maps, ":", color=PALETTE["red"], lw=1.1)
    middle = len(maps) // 2
    ax.annotate(
        "$2d^2$ floats per token", (options.lengths[middle], maps[middle]), xytext=(6, -5),
        textcoords="offset points", ha="left", va="top", fontsize=7.5, color=PALETTE["red"],
    )  # fmt: skip


def draw_sizes(options: ScanVsChunk, measured: Sequence[Row]) -> Figure:
    """Time and memory of forward and backward against head size and chunk size."""
    fig, axes = figures.figure(2, 2, panel=(3.5, 2.6))
    rows = [r for r in measured if r["direction"] == DIRECTIONS[1]]
    at_length, at_chunk = options.head_sweep_length, options.chunk_sweep_length
    heads = [
        r for r in _default_chunks(rows) if r["T"] == at_length and r["d"] in options.head_dims
    ]
    chunks = [r for r in rows if r["T"] == at_chunk and r["C"] in options.chunk_sizes]
    chunks = [r for r in chunks if r["d"] == options.head_dim]
    for row, (y, unit) in enumerate((("seconds", figures.seconds_axis),
                                     ("temporary_bytes", figures.bytes_axis))):  # fmt: skip
        _sweep(axes[row, 0], heads, "d", y)
        _sweep(axes[row, 1], chunks, "C", y)
        for ax in axes[row]:
            unit(ax, "time per call" if y == "seconds" else "temporary memory")
        figures.powers_of_two_axis(axes[row, 0], "head size d", options.head_dims)
        figures.powers_of_two_axis(axes[row, 1], "chunk size C", options.chunk_sizes)
    for ax in axes[:, 0]:
        ax.set_title(f"T = {at_length}")
    for ax in axes[:, 1]:
        ax.set_title(f"T = {at_chunk}, d = {options.head_dim}")
    sizes = [r["temporary_bytes"] for r in heads if r["implementation"] == "associative"]
    if sizes and len(options.head_dims) > 1:
        figures.slope_guide(axes[1, 0], options.head_dims, min(sizes) / 2, 2, "slope 2: $d^2$")
    figures.letter(axes.flat)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    fig.suptitle("Forward + backward", fontsize=9.5)
    return fig


def draw_training(options: ScanVsChunk, record: Run) -> Figure:
    """The loss curves on one another, their differences, and what they cost."""
    fig, axes = figures.figure(1, 3, panel=(3.0, 2.8))
    curve, difference, cost = axes.flat
    found = losses(record)
    widths, lines = (5, 2.6, 1.1), ("-", "-", "-")
    for (arm, values), width, line in zip(found.items(), widths, lines, strict=False):
        color = _arm_color(arm)
        curve.plot(np.arange(1, len(values) + 1), values, line, color=color, lw=width, label=arm)
    curve.set(title="Loss", xlabel="step", ylabel="nats per byte")
    curve.legend(loc="upper right")
    reference = found.get(REFERENCE, np.zeros(0))
    for arm, values in found.items():
        if arm == REFERENCE:
            continue
        steps = min(len(values), len(reference))
        gap = np.abs(values[:steps] - reference[:steps])
        # Losses that are equal to the last bit have no place on a log axis: half of one bit.
        gap = np.maximum(gap, 2**-24)
        color, marker = LOOKS[ARMS[arm]]
        difference.semilogy(np.arange(1, steps + 1), gap, marker, ms=3, ls="-", lw=0.6,
                            color=PALETTE[color], label=arm)  # fmt: skip
    tolerance = options.loss_tolerance
    difference.axhline(tolerance, color="black", ls="--", lw=0.9)
    difference.text(1, tolerance * 1.25, "tolerance", fontsize=7.5)
    difference.text(1, 2**-24.7, "equal to the last bit", fontsize=7.5, va="top")
    difference.set_ylim(1.2e-8, tolerance * 20)
    difference.legend(loc="upper right")
    difference.set(title="Difference from recurrent", xlabel="step", ylabel="nats per byte")
    _draw_cost(cost, record)
    figures.letter(axes.flat)
    return fig


def _arm_color(arm: str) -> str:
    """The reference lies under the others, wide and pale."""
    return "#BBBBBB" if arm == REFERENCE else PALETTE[LOOKS[ARMS[arm]][0]]


def _grouped(x: float) -> str:
    return f"{x:,.0f}".replace(",", "\u2009")


def _draw_cost(ax: Axes, record: Run) -> None:
    """Tokens per second as bars, with the step's temporary memory written on them."""
    rows = {row["arm"]: row for row in record.select(kind="arm")}
    for place, arm in enumerate(ARMS):
        if arm not in rows:
            continue
        speed, memory = rows[arm]["tokens_per_second"], rows[arm]["temporary_bytes"]
        ax.barh(place, speed, color=_arm_color(arm), height=0.5)
        text = f"{_grouped(speed)} tokens/s, {_grouped(memory / 1e6)} MB"
        ax.text(0, place + 0.33, f" {text}", va="bottom", ha="left", fontsize=7.5)
    ax.set_yticks(range(len(ARMS)), [ARMS[arm] for arm in ARMS])
    ax.set_ylim(-0.5, len(ARMS) - 0.2)
    ax.grid(axis="y", visible=False)
    ax.set(title="Speed, temporary memory", xlabel="tokens per second")
