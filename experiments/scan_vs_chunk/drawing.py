"""The figures of the ablation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import figures
from experiments.figures import PALETTE
from experiments.record import Row, Run
from experiments.scan_vs_chunk.implementations import IMPLEMENTATIONS
from experiments.scan_vs_chunk.operators import DIRECTIONS
from experiments.scan_vs_chunk.options import ScanVsChunk
from experiments.scan_vs_chunk.training import ARMS, LARGE, REFERENCE, losses
from experiments.tables import human_bytes

__all__ = ["draw_all"]


def draw_all(options: ScanVsChunk, record: Run) -> list[Path]:
    """Every figure that the record has rows for."""
    rows = record.select(kind="operator")
    measured = [row for row in rows if row["status"] == "measured"]
    here = [row for row in rows if (row["B"], row["H"]) == (options.batch_size, options.heads)]
    at_lengths = [row for row in here if row["T"] in options.lengths]
    at_sizes = [row for row in here if row["direction"] == DIRECTIONS[1] and row in measured]
    drawn = {}
    with figures.style():
        if any(row in measured for row in at_lengths):
            budget = record.find(kind="budget") or {"bytes": None}
            drawn["against_length"] = draw_lengths(options, at_lengths, budget["bytes"])
        if at_sizes:
            drawn["against_sizes"] = draw_sizes(options, at_sizes)
        if any(row["T"] in options.ratio_lengths for row in measured):
            drawn["ratio"] = draw_ratios(options, measured)
        if losses(record):
            drawn["training"] = draw_training(options, record)
        return [p for name, fig in drawn.items() for p in figures.save(fig, record.directory, name)]


def _line(ax: Axes, rows: Sequence[Row], x: str, y: str, name: str) -> None:
    """One implementation; the spread of times as bars."""
    rows = sorted(rows, key=lambda row: row[x])
    entry = IMPLEMENTATIONS[name]
    xs, ys = ([row[key] for row in rows] for key in (x, y))
    look = {"color": PALETTE[entry.color], "marker": entry.marker, "label": entry.label}
    if y != "seconds":
        ax.plot(xs, ys, **look)
        return
    low, high = (np.asarray([row[key] for row in rows]) for key in ("seconds_q25", "seconds_q75"))
    ax.errorbar(xs, ys, [ys - low, high - ys], capsize=1.5, elinewidth=0.8, **look)


def _default_chunks(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["C"] == IMPLEMENTATIONS[row["implementation"]].chunk_size]


def _sweep(ax: Axes, rows: Sequence[Row], x: str, y: str) -> None:
    for name in IMPLEMENTATIONS:
        mine = [row for row in rows if row["implementation"] == name and row.get(y)]
        if mine:
            _line(ax, mine, x, y, name)


def draw_lengths(options: ScanVsChunk, rows: Sequence[Row], budget: float | None) -> Figure:
    """Time and memory against T; proportional growth is the dashed line.

    Hollow: the memory predicted for what does not fit.
    """
    fig, axes = figures.figure(2, 2, panel=(3.5, 2.75), sharex=True)
    rows = [r for r in _default_chunks(rows) if r["d"] == options.head_dim]
    dotted = []
    for row, (y, unit) in enumerate((("seconds", figures.seconds_axis),
                                     ("temporary_bytes", figures.bytes_axis))):  # fmt: skip
        for ax, direction in zip(axes[row], DIRECTIONS, strict=True):
            mine = [r for r in rows if r["direction"] == direction]
            fits = [r for r in mine if r["status"] == "measured"]
            _sweep(ax, fits, "T", y)
            unit(ax, "time per call" if y == "seconds" else "temporary memory")
            figures.powers_of_two_axis(ax, "tokens T" if row else "", options.lengths)
            ax.set_title(direction.replace("+", " + "))
            if row:
                _draw_too_large(ax, [r for r in mine if r["status"] == "does not fit"], budget)
            _guide(ax, options, fits, y)
            if row and any(r["implementation"] == "associative" for r in fits):
                ax.plot(options.lengths, _maps(options), ":", color=PALETTE["red"], lw=1.1)
                dotted.append(ax)
    figures.letter(axes.flat)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    d = options.head_dim
    fig.suptitle(
        f"One call of the delta rule: B = {options.batch_size}, H = {options.heads}, "
        f"d = {d}, {options.dtype}",
        fontsize=9.5,
    )
    fig.draw_without_rendering()  # the slope of a line on paper is known once all has its place
    for ax in dotted:
        _name_maps(ax, options)
    return fig


def _draw_too_large(ax: Axes, rows: Sequence[Row], budget: float | None) -> None:
    """Predicted memory of what does not fit, above the line of what there is."""
    if not rows or budget is None:
        return
    ax.axhline(budget, color="black", ls=":", lw=0.9)
    ax.annotate(f"{human_bytes(budget)} at hand", (0.02, budget), xytext=(0, 2), va="bottom",
                xycoords=("axes fraction", "data"), textcoords="offset points",
                fontsize=7.5)  # fmt: skip
    for row in rows:
        entry = IMPLEMENTATIONS[row["implementation"]]
        ax.plot(row["T"], row["predicted_temporary_bytes"], entry.marker, mfc="none",
                color=PALETTE[entry.color])  # fmt: skip


def draw_ratios(options: ScanVsChunk, measured: Sequence[Row]) -> Figure:
    """Speed-up over the recurrence at a fixed number of tokens, a panel per head size."""
    fig, axes = figures.figure(1, len(options.head_dims), panel=(2.6, 2.7), sharey=True)
    for ax, d in zip(axes.flat, options.head_dims, strict=True):
        H = options.ratio_width // d
        rows = [
            r for r in _default_chunks(measured)
            if (r["d"], r["H"]) == (d, H) and r["B"] * r["T"] == options.ratio_tokens
            and r["direction"] == DIRECTIONS[1] and r["T"] in options.ratio_lengths
        ]  # fmt: skip
        base = {r["T"]: r["seconds"] for r in rows if r["implementation"] == "recurrent"}
        ratios = [r | {"ratio": base[r["T"]] / r["seconds"]} for r in rows if r["T"] in base]
        _sweep(ax, ratios, "T", "ratio")
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(figures.FuncFormatter(lambda y, _: f"{y:g}x"))
        ax.yaxis.set_minor_formatter(figures.NullFormatter())
        figures.powers_of_two_axis(ax, "tokens T of a sequence", options.ratio_lengths)
        ax.set_title(f"d = {d}, H = {H}")
    axes[0, 0].set_ylabel("times as fast as recurrent")
    figures.letter(axes.flat)
    handles = max((ax.get_legend_handles_labels() for ax in axes.flat), key=lambda x: len(x[0]))
    fig.legend(*handles, loc="outside lower center", ncols=3)
    fig.suptitle(
        f"Forward + backward of {_grouped(options.ratio_tokens)} tokens in "
        f"sequences of T, {options.dtype}",
        fontsize=9.5,
    )
    return fig


def _guide(ax: Axes, options: ScanVsChunk, rows: Sequence[Row], y: str) -> None:
    """Slope 1, below all data at every length."""
    first = options.lengths[0]
    values = [row[y] * first / row["T"] for row in rows if row.get(y)]
    if values and len(options.lengths) > 1:
        figures.slope_guide(ax, options.lengths, min(values) / 1.5, 1, "slope 1")


def _maps(options: ScanVsChunk) -> list[int]:
    """Bytes of one float32 map per token."""
    floats = options.batch_size * options.heads * 2 * options.head_dim**2
    return [4 * T * floats for T in options.lengths]


def _name_maps(ax: Axes, options: ScanVsChunk) -> None:
    """Label the dotted line along it and below; the data that it explains is above."""
    maps = _maps(options)
    (x0, y0), (x1, y1) = ax.transData.transform(
        [(options.lengths[0], maps[0]), (options.lengths[-1], maps[-1])]
    )
    ax.annotate(
        "$2d^2$ floats per token", (options.lengths[0], maps[0]), xytext=(8, -2),
        textcoords="offset points", ha="left", va="top", fontsize=7.5, color=PALETTE["red"],
        rotation=np.degrees(np.arctan2(y1 - y0, x1 - x0)), rotation_mode="anchor",
    )  # fmt: skip


def draw_sizes(options: ScanVsChunk, rows: Sequence[Row]) -> Figure:
    """Time and memory of forward and backward against head size and chunk size."""
    fig, axes = figures.figure(2, 2, panel=(3.5, 2.6))
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
    found, large = losses(record), _large_arms(record)
    fig, axes = figures.figure(1, 3 + bool(large), panel=(3.0, 2.8))
    curve, difference, cost = axes.flat[:3]
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
        entry = IMPLEMENTATIONS[ARMS[arm]]
        difference.semilogy(np.arange(1, steps + 1), gap, entry.marker, ms=3, ls="-", lw=0.6,
                            color=PALETTE[entry.color], label=arm)  # fmt: skip
    tolerance = options.loss_tolerance
    difference.axhline(tolerance, color="black", ls="--", lw=0.9)
    difference.text(1, tolerance * 1.25, "tolerance", fontsize=7.5)
    difference.text(1, 2**-24.7, "equal to the last bit", fontsize=7.5, va="top")
    difference.set_ylim(1.2e-8, tolerance * 20)
    difference.legend(loc="upper right")
    difference.set(title="Difference from recurrent", xlabel="step", ylabel="nats per byte")
    small = {a: (ARMS[a], row) for a in ARMS for row in record.select(kind="arm", arm=a)}
    _draw_cost(cost, small, "Speed, temporary memory")
    if large:
        count = next(iter(large.values()))[1]["parameters"]
        _draw_cost(axes.flat[3], large, f"{count / 1e6:.0f}M parameters, bfloat16")
    figures.letter(axes.flat)
    return fig


def _arm_color(arm: str) -> str:
    """The reference lies under the others, wide and pale."""
    return "#BBBBBB" if arm == REFERENCE else PALETTE[IMPLEMENTATIONS[ARMS[arm]].color]


def _grouped(x: float) -> str:
    return f"{x:,.0f}".replace(",", "\u2009")


def _large_arms(record: Run) -> dict[str, tuple[str, Row]]:
    rows = {row["arm"]: row for row in record.select(kind="arm")}
    return {arm: (arm.removeprefix(LARGE), row)
            for arm, row in rows.items() if arm.startswith(LARGE)}  # fmt: skip


def _draw_cost(ax: Axes, arms: Mapping[str, tuple[str, Row]], title: str) -> None:
    """Tokens per second as bars, with the step's temporary memory written on them."""
    for place, (arm, (name, row)) in enumerate(arms.items()):
        speed, memory = row["tokens_per_second"], row["temporary_bytes"]
        color = _arm_color(arm) if arm in ARMS else PALETTE[IMPLEMENTATIONS[name].color]
        ax.barh(place, speed, color=color, height=0.5)
        text = f"{_grouped(speed)} tokens/s, {_grouped(memory / 1e6)} MB"
        ax.text(0, place + 0.33, f" {text}", va="bottom", ha="left", fontsize=7.5)
    ax.set_yticks(range(len(arms)), [name for name, _ in arms.values()])
    ax.set_ylim(-0.5, len(arms) - 0.2)
    ax.grid(axis="y", visible=False)
    ax.set(title=title, xlabel="tokens per second")
