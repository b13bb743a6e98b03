"""The delta rule is one step of gradient descent on `1/2 |k S - v|^2`, of size beta.

::

    S' = S - beta k^T (k S - v)         so       k S' - v = (1 - beta |k|^2) (k S - v)

With a gate, the state decays first: weight decay, then the step. Everything in float64: the
library's `step` against `jax.grad` of the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure

from deltanet_jax import step
from deltanet_jax.compat import enable_x64
from experiments import figures
from experiments.figures import PALETTE
from experiments.record import Row, Run
from experiments.tables import console, make_table

__all__ = ["DeltaAsSgd", "run"]

GATES = ("none", "scalar", "vector")


@dataclass(frozen=True)
class DeltaAsSgd:
    """The delta rule against gradient descent, and the stable range of beta (exact, seconds)."""

    head_dim: int = 32
    """Key dimension; values have 1.5 times as many channels."""
    trials: int = 64
    """Random states, keys and values to compare on."""
    points: int = 23
    """Values of beta between 0 and 2.2 / |k|^2."""
    repeats: int = 20
    """Steps on the same pair, for the stable range."""
    seed: int = 0
    """Seed of the states, keys and values."""
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """Where run directories go."""
    name: str | None = None
    """Name of the run directory; the time by default."""


def loss(state: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`1/2 |k S - v|^2` of one memory."""
    return 0.5 * jnp.sum(jnp.square(k @ state - v))


@jax.jit
def delta_step(
    state: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array | None = None
) -> jax.Array:
    """The library's step of one memory, `state [K, V]`."""
    gate = None if g is None else g[None, None]
    _, new = step(
        k[None, None], k[None, None], v[None, None], state[None, None],
        beta=beta[None, None], g=gate,
    )  # fmt: skip
    return new[0, 0]


def descent_step(
    state: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, g: jax.Array | None = None
) -> jax.Array:
    """Weight decay if there is a gate, then one step of gradient descent of size beta."""
    if g is not None:
        state = jnp.exp(g).reshape(-1, 1) * state
    return state - beta * jax.grad(loss)(state, k, v)


def problem(options: DeltaAsSgd, gate: str) -> tuple[np.ndarray | None, ...]:
    """States, keys of any length, values, step sizes and gates, `trials` of each."""
    rng = np.random.default_rng([options.seed, GATES.index(gate)])
    n, K = options.trials, options.head_dim
    V = K + K // 2
    k = rng.standard_normal((n, K))
    g = {"none": None, "scalar": -rng.exponential(size=n), "vector": -rng.exponential(size=(n, K))}
    beta = rng.uniform(0, 2, n)
    return rng.standard_normal((n, K, V)), k, rng.standard_normal((n, V)), beta, g[gate]


def compare(options: DeltaAsSgd, gate: str) -> Row:
    """The greatest difference between the two steps, against the size of the new state."""
    args = problem(options, gate)
    delta, descent = (jax.jit(jax.vmap(f))(*args) for f in (delta_step, descent_step))
    difference = jnp.max(jnp.abs(delta - descent), axis=(1, 2)) / jnp.max(jnp.abs(delta), (1, 2))
    return {"kind": "step", "gate": gate, "largest_relative_difference": jnp.max(difference)}


def residuals(options: DeltaAsSgd, length: float) -> list[Row]:
    """`|k S' - v| / |k S - v|` against beta |k|^2, for keys of this length."""
    state, k, v, _, _ = problem(options, "none")
    k = length * k / np.linalg.norm(k, axis=-1, keepdims=True)
    steps = jax.jit(jax.vmap(delta_step))
    rows: list[Row] = []
    for size in np.linspace(0, 2.2, options.points):
        beta = np.full(options.trials, size / length**2)
        new = np.asarray(steps(state, k, v, beta))
        before, after = (np.linalg.norm(np.einsum("nk,nkv->nv", k, s) - v, axis=-1)
                         for s in (state, new))  # fmt: skip
        ratio = after / before
        rows.append(
            {
                "kind": "residual",
                "key_length": length,
                "beta_times_squared_length": size,
                "ratio": ratio.mean(),
                "largest_deviation": np.abs(ratio - abs(1 - size)).max(),
            }
        )
    return rows


def repeated(options: DeltaAsSgd, size: float) -> list[Row]:
    """The residual when one pair is presented again and again with `beta |k|^2 = size`."""
    state, k, v, _, _ = (None if x is None else jnp.asarray(x[0]) for x in problem(options, "none"))
    beta = size / jnp.sum(jnp.square(k))
    first = jnp.linalg.norm(k @ state - v)
    rows: list[Row] = []
    for count in range(options.repeats + 1):
        ratio = jnp.linalg.norm(k @ state - v) / first
        rows.append(
            {"kind": "repeated", "beta_times_squared_length": size, "steps": count, "ratio": ratio}
        )
        state = delta_step(state, k, v, beta)
    return rows


SIZES = (0.5, 1.0, 1.5, 2.0, 2.1)


def run(options: DeltaAsSgd) -> Run:
    """Measure, and write the record, the table and the figure."""
    with Run.start("delta-as-sgd", options, options.results, options.name) as record:
        with enable_x64():
            for gate in GATES:
                record.write(compare(options, gate))
            for length in (1.0, 2.0):
                for row in residuals(options, length):
                    record.write(row)
            for size in SIZES:
                for row in repeated(options, size):
                    record.write(row)
        record.write_table(row for row in record.rows if row["kind"] != "resumed")
        with figures.style():
            figures.save(draw(record.rows), record.directory, "delta_as_sgd")
        rows = [(r["gate"], f"{r['largest_relative_difference']:.1e}") for r in record.rows
                if r["kind"] == "step"]  # fmt: skip
        title = f"step against gradient descent, {options.trials} random problems, float64"
        console.print(make_table(title, ["gate", "largest relative difference"], rows))
        worst = max(r["largest_deviation"] for r in record.select(kind="residual"))
        console.print(f"residual ratio against |1 - beta |k|^2|: largest deviation {worst:.1e}")
        console.print(f"record: {record.directory}")
    return record


def draw(rows: Sequence[Row]) -> Figure:
    """The residual after one step against beta, and after many steps."""
    fig, axes = figures.figure(1, 2)
    one, many = axes.flat
    xs = np.linspace(0, 2.2, 200)
    one.axvspan(0, 2, color="#F1F6FA", zorder=0)
    one.plot(xs, np.abs(1 - xs), color="black", lw=0.9, label=r"$|1 - \beta|k|^2|$")
    for length, color, marker in ((1.0, "blue", "o"), (2.0, "orange", "x")):
        points = [r for r in rows if r["kind"] == "residual" and r["key_length"] == length]
        x = [r["beta_times_squared_length"] for r in points]
        y = [r["ratio"] for r in points]
        one.plot(x, y, marker, color=PALETTE[color], label=f"measured, |k| = {length:g}")
    one.set(title="One step", xlabel=r"$\beta\,|k|^2$", ylabel=r"$|kS' - v|\ /\ |kS - v|$")
    one.text(1.0, 0.42, "stable range", ha="center", fontsize=7.5, color="#555555")
    one.legend(loc="upper center")
    looks = zip(SIZES, ("sky", "green", "orange", "pink", "red"), "osx^v", strict=True)
    for size, color, marker in looks:
        repeats = (r for r in rows if r["kind"] == "repeated")
        points = [r for r in repeats if r["beta_times_squared_length"] == size]
        y = np.maximum([r["ratio"] for r in points], 1e-17)
        many.semilogy(
            [r["steps"] for r in points], y, marker=marker, ms=5 if marker in "ox" else 3.5,
            mfc="none", color=PALETTE[color],
            label=rf"$\beta|k|^2 = {size:g}$",
        )  # fmt: skip
    many.set(title="The same pair again", xlabel="steps", ylabel="residual / first residual")
    many.set_ylim(1e-19, 1e3)
    many.legend(loc="lower right", bbox_to_anchor=(1, 0.06))
    figures.letter(axes.flat)
    return fig
