"""Associative retrieval with learned keys: the sum against the delta rule.

The task of Schlag et al. (2021, arXiv:2102.11174): write pairs into one memory, then read it
(setting 1: every key once; setting 2: keys are written again, and the last value counts).
Keys, queries and write strengths are learned functions of the key's symbol; values are one-hot
and fixed, the loss is half the squared error. Here the memory is read with every key that was
written, where the paper reads it with one: the same task with a gradient of less noise.

Softmax attention sees no positions, so it is a ceiling for setting 1 alone: of two values of
one key it cannot tell the later.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from rich.progress import Progress

from deltanet_jax import linear_attention
from deltanet_jax.layers.features import FEATURE_MAPS
from deltanet_jax.layers.norms import NORMS
from experiments import figures
from experiments.figures import Look
from experiments.record import Row, Run
from experiments.sweep import (
    Case,
    Sweep,
    best_rate,
    check_names,
    run_sweep,
    spread,
    train_all,
)
from experiments.tables import console, make_table
from experiments.tasks.pairs import Pairs, draw_pairs

__all__ = ["PRESETS", "AssociativeRetrieval", "run"]

EXPERIMENT = "associative-retrieval"
SETTINGS = {1: "Setting 1: each key once", 2: "Setting 2: keys rewritten"}


class Rule(NamedTuple):
    """How pairs are written, and what keys are made of."""

    rule: str
    feature_map: str
    norm: str
    look: Look


RULES = {
    "softmax": Rule("softmax", "identity", "none", Look("softmax, no positions", "black", "o")),
    "sum-elu": Rule("normalised sum", "elu", "none", Look("sum, elu+1, normalised", "orange", "s")),
    "sum-l2": Rule("sum", "identity", "l2", Look("sum, L2", "pink", "D")),
    "delta-elu": Rule("delta", "elu", "sum", Look("delta, elu+1", "sky", "v")),
    "delta-dpfp": Rule("delta", "dpfp", "sum", Look("delta, DPFP-1", "green", "P")),
    "delta-l2": Rule("delta", "identity", "l2", Look("delta, L2", "blue", "^")),
}


@dataclass(frozen=True)
class AssociativeRetrieval(Sweep):
    """Learned keys, written once and rewritten: the sum, the delta rule, softmax."""

    rates: tuple[float, ...] = (1e-2,)
    steps: int = 500
    block: int = 50
    batch_size: int = 8
    rules: tuple[str, ...] = tuple(RULES)
    """Ways of writing and reading."""
    key_dim: int = 16
    """Channels of keys before the feature map."""
    counts: tuple[int, ...] = (8, 16, 24)
    """Numbers N of keys and values."""
    test_sequences: int = 128
    """Sequences of the test, for each seed."""


PRESETS = {
    "cpu": AssociativeRetrieval(),
    "gpu": AssociativeRetrieval(
        preset="gpu",
        rates=(3e-3, 1e-2),
        steps=2500,
        block=100,
        rules=("delta-l2", "sum-l2", "softmax", "delta-dpfp", "sum-elu", "delta-elu"),
        key_dim=64,
        counts=(20, 40, 60, 80, 120, 200),
        test_sequences=64,
    ),
}


class Retriever(nnx.Module):
    """One head whose keys, queries and write strengths belong to symbols."""

    def __init__(self, rule: Rule, symbols: int, key_dim: int, *, rngs: nnx.Rngs) -> None:
        """A table per projection: a linear map of an embedding, multiplied out."""
        self.rule = rule
        self.keys, self.queries = (
            nnx.Param(jax.random.normal(rngs.params(), (symbols, key_dim))) for _ in range(2)
        )
        self.strengths = nnx.Param(jnp.zeros((symbols,)))

    def __call__(self, pairs: Pairs) -> Float[Array, "B N N"]:
        """Read each key after all pairs are written."""
        symbols = self.keys.shape[0]
        real = pairs.real[..., None]
        values = jax.nn.one_hot(pairs.values, symbols) * real
        k, q = (self._features(table[...]) for table in (self.keys, self.queries))
        if self.rule.rule == "softmax":
            scores = (q @ k.T * k.shape[1] ** -0.5)[:, pairs.keys].swapaxes(0, 1)  # [B, N, T]
            seen = pairs.real[:, None, :]
            return jax.nn.softmax(scores, where=seen, axis=-1) @ values
        beta = None
        if self.rule.rule == "delta":
            beta = (jax.nn.sigmoid(self.strengths[...])[pairs.keys] * pairs.real)[..., None]
        if self.rule.rule == "normalised sum":
            values = jnp.concatenate([values, real.astype(values.dtype)], axis=-1)
        written = (k[pairs.keys] * real)[:, :, None]
        state = linear_attention(written, written, values[:, :, None], beta=beta)[1][:, 0]
        reads = q @ state
        if self.rule.rule == "normalised sum":
            return reads[..., :-1] / (reads[..., -1:] + 1e-6)
        return reads

    def _features(self, x: Float[Array, "N D"]) -> Float[Array, "N K"]:
        return NORMS[self.rule.norm](FEATURE_MAPS[self.rule.feature_map](x, 1))


def make_case(options: AssociativeRetrieval, name: str) -> Case:
    """One rule on every number of keys and both settings, side by side."""
    rule, most = RULES[name], max(options.counts)
    variants = tuple({"setting": s, "count": n} for s in SETTINGS for n in options.counts)
    counts = jnp.asarray([variant["count"] for variant in variants])
    rewriting = jnp.asarray([variant["setting"] == 2 for variant in variants])

    def errors(
        model: Retriever, key: jax.Array, variant: jax.Array, batch: int
    ) -> tuple[jax.Array, jax.Array]:
        pairs = draw_pairs(key, batch, most, counts[variant], rewriting=rewriting[variant])
        reads, asked = model(pairs), pairs.answers >= 0
        squares = jnp.sum((reads - jax.nn.one_hot(pairs.answers, most)) ** 2, axis=-1) / 2
        right = jnp.argmax(reads, axis=-1) == pairs.answers
        return jnp.mean(squares, where=asked), jnp.mean(right, where=asked)

    def loss(model: Retriever, key: jax.Array, variant: jax.Array) -> jax.Array:
        return errors(model, key, variant, options.batch_size)[0]

    def measure(model: Retriever, key: jax.Array, variant: jax.Array) -> dict[str, jax.Array]:
        found = errors(model, key, variant, options.test_sequences)
        return dict(zip(("loss", "accuracy"), found, strict=True))

    def make(rngs: nnx.Rngs) -> Retriever:
        return Retriever(rule, most, options.key_dim, rngs=rngs)

    return Case({"rule": name}, make, loss, measure, variants)


def run(options: AssociativeRetrieval) -> int:
    """Train, and write the record, the table and the figure.

    Raises:
        ValueError: If a rule has no such name.
    """
    check_names("rules", options.rules, RULES)
    return run_sweep(EXPERIMENT, options, _train, _finish)


def _train(options: AssociativeRetrieval, record: Run, bar: Progress) -> None:
    train_all(options, record, bar, [make_case(options, name) for name in options.rules])


def results(record: Run) -> dict[tuple[str, int, int], list[Row]]:
    """For every rule, setting and number of keys the lanes of the best rate."""
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in record.select(kind="result"):
        for lane in row["lanes"]:
            groups.setdefault((row["rule"], lane["setting"], lane["count"]), []).append(lane)
    return {key: best_rate(lanes, "loss", smallest=True) for key, lanes in groups.items()}


def _finish(options: AssociativeRetrieval, record: Run) -> None:
    found = results(record)
    record.write_table({"rule": rule} | lane for (rule, _, _), lanes in found.items()
                       for lane in lanes)  # fmt: skip
    for setting, title in SETTINGS.items():
        for metric in ("loss", "accuracy"):
            cells = [
                [RULES[rule].look.label]
                + [spread(lane[metric] for lane in found[rule, setting, n]) for n in options.counts]
                for rule in options.rules
                if (rule, setting, options.counts[0]) in found
            ]
            columns = [metric, *(f"N = {n}" for n in options.counts)]
            console.print(make_table(f"{title}, d = {options.key_dim}", columns, cells))
    with figures.style():
        figures.save(draw(options, found), record.directory, "associative_retrieval")


def draw(options: AssociativeRetrieval, found: dict[tuple[str, int, int], list[Row]]) -> Figure:
    """Loss and accuracy against the number of keys, both settings; bars span the seeds."""
    fig, axes = figures.figure(2, 2, panel=(3.5, 2.6), sharex=True, sharey="row")
    for column, (setting, title) in enumerate(SETTINGS.items()):
        for ax, metric in zip(axes[:, column], ("loss", "accuracy"), strict=True):
            for name in options.rules:
                if (name, setting, options.counts[0]) in found:
                    lanes = [found[name, setting, n] for n in options.counts]
                    values = [[x[metric] for x in ls] for ls in lanes]
                    figures.spread_line(ax, options.counts, values, RULES[name].look)
            ax.axvline(options.key_dim, color="black", ls="--", lw=0.9)
            ax.set(title=f"{title}", ylabel="half squared error" if metric == "loss" else
                   "fraction right")  # fmt: skip
        axes[0, column].set_yscale("log")
        axes[1, column].set(xlabel="keys N", xticks=options.counts, ylim=(0, 1.05))
    axes[0, 0].annotate("N = d", (options.key_dim, 1), xytext=(3, -8), fontsize=7.5,
                        xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip
    figures.letter(axes.flat)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig
