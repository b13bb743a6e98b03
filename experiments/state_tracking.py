"""Tracking a state that never settles: parity, and the permutations of three things.

A step of the delta rule multiplies the state by `I - beta k^T k`, whose eigenvalue along `k`
is `1 - beta`. Parity needs a step that turns the state over: an eigenvalue of -1, so `beta`
of 2. With `beta` below 1 every eigenvalue is positive, and no linear recurrence of finite
precision with positive eigenvalues has the parity of words of any length (Grazzi et al., 2024,
arXiv:2411.12537). One reflection per element cannot make a rotation of three things; two can
(Siems et al., 2025, arXiv:2502.10297): spelt with two tokens, an element gets two reflections.

One layer is trained on short words, with the product asked for at every element, and read at
every position of words that are many times longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import Progress

from deltanet_jax.layers.gates import write_strength
from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from experiments import figures
from experiments.figures import PALETTE
from experiments.models import make_model
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
from experiments.tasks.groups import GROUPS, group_words

__all__ = ["PRESETS", "StateTracking", "run"]

EXPERIMENT = "state-tracking"
WINDOW = 8  # positions whose accuracies are averaged


class Arm(NamedTuple):
    """One model on one group."""

    memory: str
    negative: bool
    parts: int
    label: str
    color: str
    marker: str


ARMS = {
    "delta01": Arm("delta", False, 1, r"DeltaNet, $\beta\in(0,1)$", "orange", "s"),
    "delta02": Arm("delta", True, 1, r"DeltaNet, $\beta\in(0,2)$", "blue", "^"),
    "gated02": Arm("gated-delta", True, 1, r"Gated DeltaNet, $\beta\in(0,2)$", "green", "v"),
    "softmax": Arm("softmax", False, 1, "softmax attention", "black", "o"),
    "double01": Arm("delta", False, 2, r"two tokens, $\beta\in(0,1)$", "pink", "D"),
    "double02": Arm("delta", True, 2, r"two tokens, $\beta\in(0,2)$", "red", "P"),
}


@dataclass(frozen=True)
class StateTracking(ModelSweep):
    """Parity and S3: eigenvalues in (0, 1) against (-1, 1), and words longer than in training."""

    rates: tuple[float, ...] = (3e-3, 1e-2)
    steps: int = 600
    parity_arms: tuple[str, ...] = ("softmax", "delta01", "delta02")
    """Models on parity."""
    permutation_arms: tuple[str, ...] = ()
    """Models on the permutations of three things."""
    length: int = 16
    """Elements of the words in training."""
    test_length: int = 256
    """Elements of the words in the test; a multiple of 8."""
    test_words: int = 128
    """Words of the test, for each seed."""
    hidden_size: int = 16
    """Channels."""
    heads: int = 1
    """Heads."""
    layers: int = 1
    """Blocks."""
    conv_size: int | None = None
    """Taps of the short convolutions; none of these groups needs them."""


PRESETS = {
    "cpu": StateTracking(),
    "gpu": StateTracking(
        preset="gpu",
        rates=(1e-3, 3e-3, 1e-2),
        steps=4000,
        block=200,
        batch_size=128,
        parity_arms=("delta02", "delta01", "gated02", "softmax"),
        permutation_arms=("double02", "delta02", "double01", "delta01"),
        length=40,
        test_length=512,
        hidden_size=128,
        heads=4,
    ),
}


def make_case(options: StateTracking, group: str, name: str) -> Case:
    """One arm on one group."""
    arm = ARMS[name]
    config = DeltaNetConfig(
        vocab_size=len(GROUPS[group]) * arm.parts,
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        num_heads=options.heads,
        allow_neg_eigval=arm.negative,
        conv_size=options.conv_size,
        mlp_size=options.hidden_size,
        dtype=options.dtype,
    )

    def loss(model: DeltaNetLM, key: jax.Array, _: jax.Array) -> jax.Array:
        words, products = group_words(key, group, options.batch_size, options.length, arm.parts)
        return cross_entropy(model(words), products)[0]

    def measure(model: DeltaNetLM, key: jax.Array, _: jax.Array) -> dict[str, jax.Array]:
        words, products = group_words(
            key, group, options.test_words, options.test_length, arm.parts
        )
        right = jnp.argmax(model(words), axis=-1) == products
        right = right[:, arm.parts - 1 :: arm.parts]
        seen, unseen = right[:, : options.length], right[:, options.length :]
        found = {
            "seen": seen.mean(),
            "unseen": unseen.mean(),
            "by_position": right.mean(0).reshape(-1, WINDOW).mean(1),
        }
        return found | write_strengths(model, config)

    def make(rngs: nnx.Rngs) -> DeltaNetLM:
        return make_model(config, arm.memory, rngs, implementation=options.implementation)

    return Case({"group": group, "arm": name}, make, loss, measure)


def write_strengths(model: DeltaNetLM, config: DeltaNetConfig) -> dict[str, jax.Array]:
    """`beta` of the first layer for every element, `[elements, heads]`; a token alone decides."""
    block = model.blocks[0]
    if not hasattr(block.mixer, "b_proj"):
        return {}
    x = block.mixer_norm(model.embedding[...])[None]
    logits = block.mixer.b_proj(x)
    beta = write_strength(logits, logits.shape, allow_neg_eigval=config.allow_neg_eigval)
    return {"beta": beta[0]}


def cases(options: StateTracking) -> list[Case]:
    """All that is trained.

    Raises:
        ValueError: If an arm has no such name, or the test length does not fit.
    """
    check_names("parity_arms", options.parity_arms, ARMS)
    check_names("permutation_arms", options.permutation_arms, ARMS)
    if options.test_length % WINDOW or options.test_length <= options.length:
        raise ValueError(
            f"`test_length` must be a multiple of {WINDOW} above length={options.length}; "
            f"got {options.test_length}"
        )
    groups = {"parity": options.parity_arms, "S3": options.permutation_arms}
    return [make_case(options, group, name) for group in groups for name in groups[group]]


def run(options: StateTracking) -> int:
    """Train, and write the record, the table and the figure."""
    return run_sweep(EXPERIMENT, options, _train, _finish)


def _train(options: StateTracking, record: Run, bar: Progress) -> None:
    train_all(options, record, bar, cases(options))


def results(record: Run) -> dict[tuple[str, str], list[Row]]:
    """For every group and arm the lanes of its best rate."""
    rows = record.select(kind="result")
    return {(row["group"], row["arm"]): best_rate(row["lanes"], "unseen") for row in rows}


def _finish(options: StateTracking, record: Run) -> None:
    found = results(record)
    record.write_table(
        {"group": group, "arm": arm, **{n: lane[n] for n in ("seed", "rate", "seen", "unseen")}}
        for (group, arm), lanes in found.items()
        for lane in lanes
    )
    cells = [
        [group, ARMS[arm].label.replace("$", "").replace(r"\beta\in", "beta in ")]
        + [spread(lane[name] for lane in lanes) for name in ("seen", "unseen")]
        for (group, arm), lanes in found.items()
    ]
    last = f"to {options.length}"
    columns = [
        "group",
        "model",
        f"fraction right, {last}",
        f"fraction right, to {options.test_length}",
    ]
    title = f"Mean, least and greatest of {options.seeds} seeds"
    console.print(make_table(title, columns, cells))
    with figures.style():
        figures.save(draw(options, found), record.directory, "state_tracking")


def draw(options: StateTracking, found: dict[tuple[str, str], list[Row]]) -> Figure:
    """Accuracy against position, and the write strengths that were learned for parity."""
    groups = list(dict.fromkeys(group for group, _ in found))
    fig, axes = figures.figure(1, len(groups) + 1, panel=(3.6, 2.9))
    for ax, group in zip(axes.flat, groups, strict=False):
        _draw_accuracy(ax, options, group, {a: x for (g, a), x in found.items() if g == group})
    _draw_strengths(axes.flat[-1], {arm: x for (g, arm), x in found.items() if g == groups[0]})
    figures.letter(axes.flat)
    return fig


def _draw_accuracy(
    ax: figures.Axes, options: StateTracking, group: str, lanes_of: dict[str, Sequence[Row]]
) -> None:
    """The mean over seeds as a line, each seed thin."""
    for name, lanes in lanes_of.items():
        arm = ARMS[name]
        curves = np.asarray([lane["by_position"] for lane in lanes])
        x = WINDOW * (np.arange(curves.shape[1]) + 0.5)
        color = PALETTE[arm.color]
        ax.plot(x, curves.T, color=color, lw=0.7, alpha=0.45)
        ax.plot(x, curves.mean(0), color=color, marker=arm.marker, ms=3.5, label=arm.label,
                markevery=max(1, len(x) // 8))  # fmt: skip
    chance = 1 / len(GROUPS[group])
    ax.axvspan(0, options.length, color="#EEEEEE", zorder=0)
    ax.text(options.length * 1.1, 1.03, "longer than in training", fontsize=7.5, va="bottom")
    ax.axhline(chance, color="black", ls=":", lw=0.9)
    ax.text(options.test_length, chance - 0.05, "chance", ha="right", va="top", fontsize=7.5)
    ax.set(title=group, xlabel="position in the word", ylabel="fraction right")
    ax.set(xlim=(0, options.test_length), ylim=(max(0, chance - 0.2), 1.12))
    ax.set_yticks(np.arange(0 if chance < 0.3 else 4, 11, 2) / 10)
    _legend_below(ax)


def _draw_strengths(ax: figures.Axes, lanes_of: dict[str, Sequence[Row]]) -> None:
    """`beta` of every head and seed for the element that keeps the parity and that flips it."""
    rng = np.random.default_rng(0)
    for name, lanes in lanes_of.items():
        arm = ARMS[name]
        values = [np.asarray(lane["beta"])[:2] for lane in lanes if "beta" in lane]
        for element in range(2) if values else ():
            points = np.concatenate([v[element] for v in values])
            x = element + rng.uniform(-0.12, 0.12, len(points))
            ax.plot(x, points, arm.marker, color=PALETTE[arm.color], alpha=0.8,
                    label=arm.label if element == 0 else None)  # fmt: skip
    for height in (1, 2):
        ax.axhline(height, color="black", ls=":", lw=0.9)
    ax.set_xticks([0, 1], ["0 (keeps)", "1 (flips)"])
    ax.set(title=r"Learned $\beta$", xlabel="element", xlim=(-0.5, 1.5), ylim=(-0.05, 2.1))
    ax.set_ylabel(r"$\beta$ of each head and seed")
    ax.grid(axis="x", visible=False)
    _legend_below(ax)


def _legend_below(ax: figures.Axes) -> None:
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
