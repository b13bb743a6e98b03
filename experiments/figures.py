"""One look for all figures: legible in print, and by colour-blind readers."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

__all__ = [
    "MEMORIES",
    "PALETTE",
    "Look",
    "bytes_axis",
    "figure",
    "letter",
    "powers_of_two_axis",
    "save",
    "seconds_axis",
    "slope_guide",
    "spread_line",
    "style",
]

# Okabe and Ito's colours, which keep apart under the common colour deficiencies.
PALETTE = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "blue": "#0072B2",
    "red": "#D55E00",
    "pink": "#CC79A7",
    "grey": "#7F7F7F",
}


class Look(NamedTuple):
    """How one model is drawn in every panel."""

    label: str
    color: str
    """A name in `PALETTE`."""
    marker: str


# The memories of `experiments.models`.
MEMORIES = {
    "softmax": Look("softmax attention", "black", "o"),
    "linear": Look("linear attention (sum)", "orange", "s"),
    "gated-linear": Look("gated linear attention", "pink", "D"),
    "delta": Look("DeltaNet", "blue", "^"),
    "gated-delta": Look("Gated DeltaNet", "green", "v"),
}

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}


@contextmanager
def style() -> Iterator[None]:
    """Set the style of the figures drawn inside."""
    with mpl.rc_context(STYLE):
        yield


def figure(
    rows: int = 1, columns: int = 2, *, panel: tuple[float, float] = (3.4, 2.7), **options: object
) -> tuple[Figure, np.ndarray]:
    """A grid of panels, each `panel` inches wide and high; the axes are `[rows, columns]`."""
    width, height = panel
    fig = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False, **options)


def save(fig: Figure, directory: Path, name: str) -> list[Path]:
    """Write `name.png` and `name.pdf`."""
    # The font's own time stamp makes the PDF writer complain on standard error.
    logging.getLogger("fontTools").setLevel(logging.ERROR)
    paths = [directory / f"{name}.{kind}" for kind in ("png", "pdf")]
    fig.savefig(paths[0])
    fig.set_layout_engine("none")  # the second file needs no second search for the same layout
    fig.savefig(paths[1])
    return paths


def letter(axes: Sequence[Axes]) -> None:
    """Call the panels a, b, c by their titles."""
    for name, ax in zip("abcdefgh", axes, strict=False):
        title = ax.get_title()
        ax.set_title("")
        ax.set_title(f"({name})  {title}", loc="left")


def spread_line(
    ax: Axes, x: Sequence[float], values: Sequence[Sequence[float]], look: Look
) -> None:
    """The mean of each row of `values` against `x`; bars span its least and greatest."""
    y = np.asarray(values, float)
    mean = y.mean(1)
    bars = [mean - y.min(1), y.max(1) - mean]
    ax.errorbar(x, mean, bars, capsize=1.5, elinewidth=0.8, marker=look.marker,
                color=PALETTE[look.color], label=look.label)  # fmt: skip


def powers_of_two_axis(ax: Axes, label: str, ticks: Sequence[float]) -> None:
    """A log axis whose ticks are the measured sizes."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(ticks), [f"{int(t):,}".replace(",", "\u2009") for t in ticks])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(axis="x", which="minor", length=0)
    ax.set_xlabel(label)


def bytes_axis(ax: Axes, label: str) -> None:
    """A log axis in B, kB, MB, GB."""
    _unit_axis(ax, label, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def seconds_axis(ax: Axes, label: str) -> None:
    """A log axis in µs, ms, s."""
    _unit_axis(ax, label, ((1, "s"), (1e-3, "ms"), (1e-6, "µs")))


def _unit_axis(ax: Axes, label: str, units: Sequence[tuple[float, str]]) -> None:
    def text(x: float, _: int) -> str:
        size, unit = next((u for u in units if x >= u[0] * 0.999), units[-1])
        return f"{x / size:g} {unit}"

    def minor(x: float, place: int) -> str:
        low, high = ax.get_ylim()
        digit = round(x / 10 ** math.floor(math.log10(x) + 1e-9))
        # Less than a decade and a half has too few powers of ten to read a value by.
        return text(x, place) if high / low < 30 and digit in (2, 5) else ""

    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(text))
    ax.yaxis.set_minor_formatter(FuncFormatter(minor))
    ax.tick_params(axis="y", which="minor", labelsize=STYLE["ytick.labelsize"])
    ax.set_ylabel(label)


def slope_guide(
    ax: Axes, x: Sequence[float], start: float, slope: float, label: str, *, place: float = 0.5
) -> None:
    """A dashed line of this slope on log axes, named at the fraction `place` of its length."""
    xs = np.asarray([x[0], x[-1]], float)
    ax.plot(xs, start * (xs / xs[0]) ** slope, "--", color=PALETTE["grey"], lw=0.9, zorder=1)
    at = xs[0] * (xs[1] / xs[0]) ** place
    ax.annotate(
        label,
        (at, start * (at / xs[0]) ** slope),
        xytext=(3, -3),
        textcoords="offset points",
        va="top",
        fontsize=7.5,
        color="#555555",
    )
