"""Measure what an untrained memory of one head holds: the sum, and the delta rule.

Keys are random unit vectors, values random unit vectors, everything in float64 through the
operators of the library. Four exact statements, no training:

* written once each, `n` pairs leave the sum with a mean squared error of `(n - 1) / d`;
* the delta rule's squared error is lower, yet the stored value nearest to what it reads is
  *less* often the right one: it favours recent pairs (error 0 on the newest), so it does not
  hold more write-once pairs;
* orthonormal keys are exact in both, and there are at most `d` of them;
* a key that is written again holds the new value with the delta rule, and the sum of all of
  its values without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from deltanet_jax import linear_attention
from deltanet_jax.compat import enable_x64
from experiments import figures
from experiments.figures import PALETTE
from experiments.record import Row, Run
from experiments.tables import console, make_table

__all__ = ["MemoryCapacity", "run"]

RULES = ("sum", "delta")
LABELS = {"sum": "sum", "delta": "delta rule"}
SHADES = ("sky", "green", "blue", "pink", "red")


@dataclass(frozen=True)
class MemoryCapacity:
    """Reading errors of an untrained memory: capacity, age, overwriting (exact, seconds)."""

    head_dims: tuple[int, ...] = (16, 32, 64, 128)
    """Key dimensions d; values have the same."""
    load: int = 4
    """Pairs written, as a multiple of d; the memory is read every d/4 pairs."""
    trials: int = 16
    """Independent memories to average over."""
    rewrites: int = 8
    """How often every key of an orthonormal set is written again."""
    seed: int = 0
    """Seed of the keys and values."""
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """Where run directories go."""
    name: str | None = None
    """Name of the run directory; the time by default."""


def unit_vectors(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random directions."""
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def orthonormal_keys(rng: np.random.Generator, trials: int, d: int) -> np.ndarray:
    """`d` orthonormal keys per trial, `[trials, d, d]`."""
    return np.linalg.qr(rng.standard_normal((trials, d, d)))[0]


@partial(jax.jit, static_argnames="rule")
def write(keys: jax.Array, values: jax.Array, state: jax.Array, rule: str) -> jax.Array:
    """Write pairs `[trials, n, d]` into states `[trials, d, d]`; the step size is 1."""
    k, v = keys[:, :, None], values[:, :, None]
    beta = jnp.ones(k.shape[:3], k.dtype) if rule == "delta" else None
    _, final = linear_attention(
        k, k, v, beta=beta, initial_state=state[:, None], implementation="recurrent"
    )
    return final[:, 0]


def squared_errors(reads: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`|k S - v|^2 / |v|^2` of every pair, `[trials, n]`."""
    return np.square(reads - values).sum(-1) / np.square(values).sum(-1)


def nearest_accuracy(reads: np.ndarray, values: np.ndarray) -> float:
    """Count how often the stored value nearest to a read is right (values are unit vectors)."""
    nearest = (reads @ values.swapaxes(1, 2)).argmax(-1)
    return float((nearest == np.arange(values.shape[1])).mean())


def write_once(options: MemoryCapacity, d: int, rule: str) -> tuple[list[Row], np.ndarray]:
    """Errors after every `d/4` pairs, and the mean error of each pair at the end, newest first."""
    rng = np.random.default_rng([options.seed, d])
    n = options.load * d
    keys, values = (unit_vectors(rng, options.trials, n, d) for _ in range(2))
    state = jnp.zeros((options.trials, d, d), keys.dtype)
    rows: list[Row] = []
    piece = max(1, d // 4)
    for end in range(piece, n + 1, piece):
        state = write(keys[:, end - piece : end], values[:, end - piece : end], state, rule)
        reads = keys[:, :end] @ np.asarray(state)
        errors = squared_errors(reads, values[:, :end])
        rows.append(
            {
                "kind": "write-once",
                "rule": rule,
                "d": d,
                "pairs": end,
                "load": end / d,
                "error": errors.mean(),
                "error_of_newest": errors[:, -1].max(),
                "expected_of_sum": (end - 1) / d,
                "nearest_accuracy": nearest_accuracy(reads, values[:, :end]),
            }
        )
    return rows, errors.mean(0)[::-1]


def rewrite(options: MemoryCapacity, d: int, rule: str) -> list[Row]:
    """Write `d` orthonormal keys again and again with new values; the error is of the latest."""
    rng = np.random.default_rng([options.seed, d, 1])
    keys = orthonormal_keys(rng, options.trials, d)
    state = jnp.zeros((options.trials, d, d), keys.dtype)
    rows: list[Row] = []
    for count in range(options.rewrites + 1):
        values = unit_vectors(rng, options.trials, d, d)
        state = write(keys, values, state, rule)
        errors = squared_errors(keys @ np.asarray(state), values)
        rows.append(
            {
                "kind": "rewrite",
                "rule": rule,
                "d": d,
                "rewrites": count,
                "error": errors.mean(),
                "worst_error": errors.max(),
            }
        )
    return rows


def run(options: MemoryCapacity) -> Run:
    """Measure, and write the record, the table and the figure."""
    with Run.start("memory-capacity", options, options.results, options.name) as record:
        with enable_x64():
            ages = _measure(options, record)
        curves, again = record.select(kind="write-once"), record.select(kind="rewrite")
        record.write_table(curves + again)
        with figures.style():
            figures.save(draw(options, curves, again, ages), record.directory, "memory_capacity")
        _show(options, curves, again)
        console.print(f"record: {record.directory}")
    return record


def _measure(options: MemoryCapacity, record: Run) -> dict[str, np.ndarray]:
    """All rows into the record; returned are the errors by age at the largest `d`."""
    ages = {}
    for d in options.head_dims:
        for rule in RULES:
            rows, ages[rule] = write_once(options, d, rule)
            for row in rows + rewrite(options, d, rule):
                record.write(row)
    for rule in RULES:
        record.write({"kind": "age", "rule": rule, "d": d, "error_newest_first": list(ages[rule])})
    return ages


def _show(options: MemoryCapacity, curves: Sequence[Row], again: Sequence[Row]) -> None:
    d = options.head_dims[-1]
    loads = [load for load in (0.5, 1, 1.5, 2, 3, 4) if load <= options.load]
    at = {(r["rule"], r["load"]): r for r in curves if r["d"] == d}
    rows = [
        [f"{load:g}"]
        + [f"{at['sum', load]['expected_of_sum']:.3f}"]
        + [f"{at[rule, load]['error']:.3f}" for rule in RULES]
        + [f"{at[rule, load]['nearest_accuracy']:.3f}" for rule in RULES]
        for load in loads
        if ("sum", load) in at
    ]
    columns = ["pairs / d", "(n-1)/d", "sum: error", "delta: error"]
    columns += ["sum: nearest right", "delta: nearest right"]
    console.print(make_table(f"Each pair written once, d = {d}", columns, rows))
    latest = {(r["rule"], r["rewrites"]): r["error"] for r in again if r["d"] == d}
    rows = [
        [count] + [f"{latest[rule, count]:.2e}" for rule in RULES]
        for count in range(options.rewrites + 1)
    ]
    title = f"Orthonormal keys written again, d = {d}: error of the latest value"
    console.print(make_table(title, ["rewrites", "sum", "delta"], rows))


def draw(
    options: MemoryCapacity,
    curves: Sequence[Row],
    again: Sequence[Row],
    ages: dict[str, np.ndarray],
) -> Figure:
    """Error and accuracy against the load, error by age, overwriting."""
    fig, axes = figures.figure(2, 2, panel=(3.5, 2.75))
    capacity, accuracy, age, overwrite = axes.flat
    for d, shade in zip(options.head_dims, SHADES, strict=False):
        for rule, line in zip(RULES, ("-", "--"), strict=True):
            rows = [r for r in curves if r["d"] == d and r["rule"] == rule]
            x = [r["load"] for r in rows]
            shape = {"color": PALETTE[shade], "ls": line}
            capacity.plot(x, [r["error"] for r in rows], **shape)
            accuracy.plot(x, [r["nearest_accuracy"] for r in rows], **shape)
    xs = np.asarray([0, options.load])
    capacity.plot(xs, xs, color="black", lw=0.8, ls=":")
    capacity.set(title="Squared error, written once", xlabel="pairs / d")
    capacity.set_ylabel(r"mean $|kS - v|^2 / |v|^2$")
    capacity.text(2.3, 2.9, "sum: $(n-1)/d$", ha="right")
    capacity.text(2.4, 1.52, "delta rule", ha="center")
    _legend_of_sizes(accuracy, options.head_dims)
    accuracy.set(title="Nearest stored value", xlabel="pairs / d", ylim=(0, 1.03))
    accuracy.set_ylabel("fraction right")
    _draw_ages(age, options.head_dims[-1], ages)
    _draw_overwriting(overwrite, options.head_dims[-1], again)
    figures.letter(axes.flat)
    return fig


def _legend_of_sizes(ax: figures.Axes, head_dims: Sequence[int]) -> None:
    """Colours are sizes and line styles are rules, in every panel that has both."""
    sizes = [
        Line2D([], [], color=PALETTE[shade], label=f"d = {d}")
        for d, shade in zip(head_dims, SHADES, strict=False)
    ]
    rules = [
        Line2D([], [], color="black", ls=line, label=rule)
        for rule, line in zip(LABELS.values(), ("-", "--"), strict=True)
    ]
    ax.legend(handles=sizes + rules, loc="lower left", ncols=2)


def _draw_ages(ax: figures.Axes, d: int, ages: dict[str, np.ndarray]) -> None:
    for rule, color in zip(RULES, ("orange", "blue"), strict=True):
        ax.plot(
            np.arange(len(ages[rule])) / d,
            ages[rule],
            color=PALETTE[color],
            lw=1,
            label=LABELS[rule],
        )
    ax.set(title=f"By age, {len(ages['sum']) // d}d pairs written, d = {d}")
    ax.set(xlabel="pairs written since / d", ylim=(0, None))
    ax.set_ylabel(r"mean $|kS - v|^2 / |v|^2$")
    ax.legend()


def _draw_overwriting(ax: figures.Axes, d: int, again: Sequence[Row]) -> None:
    for rule, color, marker in zip(RULES, ("orange", "blue"), "os", strict=True):
        rows = [r for r in again if r["d"] == d and r["rule"] == rule]
        x, y = [r["rewrites"] for r in rows], [r["error"] for r in rows]
        ax.plot(x, y, marker=marker, color=PALETTE[color], label=LABELS[rule])
    ax.set(title=f"Orthonormal keys rewritten, d = {d}", xlabel="times rewritten")
    ax.set_ylabel("error of the latest value")
    ax.legend()
