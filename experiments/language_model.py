"""Byte-level language models of one size that differ in their memory, and in its details.

The arms read the same bytes in the same order with as many parameters: they differ in whether
the memory decays and whether it corrects what it holds; softmax attention is the baseline. The
ablations take one thing from DeltaNet at a time: L2 normalisation of queries and keys, SiLU,
convolutions. After training a model continues a piece of held-out text; what a token of
that costs against the length of the context is measured beside a cache of keys and values.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import Progress

from deltanet_jax.models import DeltaNetConfig, DeltaNetLM, generate
from deltanet_jax.models.training import bits_per_token, next_token_loss
from experiments import decoding, figures
from experiments.figures import PALETTE
from experiments.models import make_model
from experiments.record import Row, Run
from experiments.sweep import (
    Case,
    ModelSweep,
    best_rate,
    check_names,
    run_sweep,
    spread,
    train_all,
)
from experiments.tables import console, human_bytes, human_seconds, make_table
from experiments.tasks.text import Text, note_text, read_shuffled

__all__ = ["PRESETS", "LanguageModel", "run"]

EXPERIMENT = "language-model"
BYTES = 256
HELD_OUT = 0.05  # of the text
SAME_SIZE = 0.02  # by which counts of parameters may differ


class Arm(NamedTuple):
    """One model."""

    memory: str
    changes: Mapping[str, object]
    label: str
    color: str
    marker: str


ARMS = {
    name: Arm(name, {}, *figures.MEMORIES[name])
    for name in ("linear", "gated-linear", "delta", "gated-delta", "softmax")
}
ABLATIONS = {
    name: Arm("delta", changes, label, "blue", "^")
    for name, changes, label in (
        ("no-conv", {"conv_size": None}, "SiLU, L2, no convolution"),
        ("elu", {"feature_map": "elu"}, "ELU+1, L2"),
        ("relu", {"feature_map": "relu"}, "ReLU, L2"),
        ("l1", {"qk_norm": "sum"}, "SiLU, L1"),
        ("elu-l1", {"feature_map": "elu", "qk_norm": "sum"}, "ELU+1, L1"),
        ("relu-l1", {"feature_map": "relu", "qk_norm": "sum"}, "ReLU, L1"),
    )
}
MODELS = ARMS | ABLATIONS


@dataclass(frozen=True)
class LanguageModel(ModelSweep):
    """Bits per byte of five memories at one size, ablations of DeltaNet, the cost of a token."""

    steps: int = 100
    block: int = 20
    batch_size: int = 8
    arms: tuple[str, ...] = tuple(ARMS)
    """Models that are compared; with no name after it, none."""
    ablations: tuple[str, ...] = ("no-conv", "elu-l1")
    """Variants of DeltaNet; with no name after it, none."""
    contexts: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Context lengths at which a token is timed; with none after it, nothing is."""
    text: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH...")] = ()
    """Files, directories of files or corpora written by `pack-text`; by default the source of
    this Python's standard library."""
    text_bytes: int = 8_000_000
    """Bytes of the text to use, at most; of a corpus no more is read."""
    length: int = 64
    """Bytes of a sequence."""
    test_windows: int = 64
    """Held-out sequences, the same for all; a multiple of `batch_size`."""
    hidden_size: int = 32
    """Channels."""
    heads: int = 1
    """Heads of every mixer."""
    layers: int = 1
    """Blocks."""
    sample_bytes: int = 200
    """Bytes that a trained DeltaNet writes."""
    decode_batch: int = 1
    """Sequences that are decoded at a time."""
    decode_tokens: int = 16
    """Tokens that are timed together."""


PRESETS = {
    "cpu": LanguageModel(),
    "gpu": LanguageModel(
        preset="gpu",
        rates=(1e-3, 3e-3),
        steps=2000,
        block=200,
        batch_size=16,
        ablations=tuple(ABLATIONS),
        contexts=(1024, 4096, 16384, 65536),
        length=512,
        test_windows=256,
        hidden_size=256,
        heads=4,
        layers=4,
        dtype="bfloat16",
        sample_bytes=400,
        decode_batch=16,
        decode_tokens=32,
    ),
}


class Split(NamedTuple):
    """One text in two parts."""

    train: Int[np.ndarray, " N"]
    test: Int[np.ndarray, " M"]


def read(options: LanguageModel) -> tuple[Text, Split]:
    """Shuffled documents, of which the last are held out.

    Raises:
        ValueError: If the text is too short, or its tokens are no bytes.
    """
    text = read_shuffled([Path(name) for name in options.text], options.text_bytes)
    test = round(len(text.data) * HELD_OUT)
    if test <= options.length:
        raise ValueError(
            f"`text` must have more than {options.length / HELD_OUT:.0f} bytes for "
            f"length={options.length}; got {len(text.data)}"
        )
    return text, Split(text.data[:-test], text.data[-test:])


def config_of(options: LanguageModel, arm: Arm) -> DeltaNetConfig:
    """The shape of a model; the gate is the memory's."""
    shape = {
        "vocab_size": BYTES,
        "hidden_size": options.hidden_size,
        "num_layers": options.layers,
        "num_heads": options.heads,
        "dtype": options.dtype,
    }
    return DeltaNetConfig(**shape | dict(arm.changes))


def make_case(options: LanguageModel, split: Split, name: str) -> Case:
    """One model on the text, which stays on the device."""
    arm = MODELS[name]
    config = config_of(options, arm)
    data = jnp.asarray(split.train)
    last = len(split.test) - options.length
    starts = np.linspace(0, last, options.test_windows).astype(int)
    held_out = jnp.asarray(split.test[starts[:, None] + np.arange(options.length)], jnp.int32)

    def loss(model: DeltaNetLM, key: jax.Array, _: jax.Array) -> jax.Array:
        starts = jax.random.randint(key, (options.batch_size, 1), 0, len(data) - options.length + 1)
        rows = data[starts + jnp.arange(options.length)]
        return next_token_loss(model, rows.astype(jnp.int32))

    def measure(model: DeltaNetLM, key: jax.Array, _: jax.Array) -> dict[str, jax.Array]:
        batches = held_out.reshape(-1, options.batch_size, options.length)
        losses = jax.lax.map(lambda rows: byte_losses(model, rows).mean(0), batches).mean(0)
        bits = bits_per_token(losses)
        found = {"bits": bits.mean(), "by_position": jnp.stack([
            bits[start:end].mean() for start, end in _ranges(options.length)
        ])}  # fmt: skip
        if name == "delta":
            found["sample"] = generate(
                model, held_out[:1], options.sample_bytes, key=key, temperature=0.8
            )[0]
        return found

    def make(rngs: nnx.Rngs) -> DeltaNetLM:
        return make_model(config, arm.memory, rngs, implementation=options.implementation)

    return Case({"arm": name}, make, loss, measure)


def byte_losses(model: DeltaNetLM, rows: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """Nats of every byte given those before it."""
    scores = jax.nn.log_softmax(model(rows)[:, :-1])
    return -jnp.take_along_axis(scores, rows[:, 1:, None], axis=-1)[..., 0]


def _ranges(length: int) -> list[tuple[int, int]]:
    """Bytes of context, from 1 up to twice that and so on, as indices of losses."""
    edges = [2**n - 1 for n in range(length.bit_length()) if 2**n < length] + [length - 1]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def cases(options: LanguageModel, split: Split) -> list[Case]:
    """All that is trained: the arms, then the ablations.

    Raises:
        ValueError: If a model has no such name, or is of another size than the first.
    """
    names = options.arms + options.ablations
    check_names("arms", options.arms, ARMS)
    check_names("ablations", options.ablations, ABLATIONS)
    if options.test_windows % options.batch_size:
        raise ValueError(
            f"`test_windows` must be a multiple of batch_size={options.batch_size}; "
            f"got {options.test_windows}"
        )
    found = [make_case(options, split, name) for name in names]
    counts = {name: parameters(case) for name, case in zip(names, found, strict=True)}
    if counts and max(counts.values()) > (1 + SAME_SIZE) * min(counts.values()):
        raise ValueError(f"models must be of one size; their parameters are {counts}")
    return found


def parameters(case: Case) -> int:
    """How many numbers a model learns."""
    model = nnx.eval_shape(lambda: case.make(nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model)))


def run(options: LanguageModel) -> int:
    """Train and measure, and write the record, the tables and the figures."""
    return run_sweep(EXPERIMENT, options, _train, _finish)


def _train(options: LanguageModel, record: Run, bar: Progress) -> None:
    if options.arms or options.ablations:
        text, split = read(options)
        note_text(record, text)
        train_all(options, record, bar, cases(options, split))
    if options.contexts:
        load = decoding.Load(options.decode_batch, options.decode_tokens, min(options.contexts))
        config = config_of(options, ARMS["delta"])
        decoding.measure(record, config, options.contexts, load, bar)


def results(record: Run) -> dict[str, tuple[Row, list[Row]]]:
    """For every model its row and the lanes of its best rate, in the order of training."""
    rows = record.select(kind="result")
    return {r["arm"]: (r, best_rate(r["lanes"], "bits", smallest=True)) for r in rows}


def _finish(options: LanguageModel, record: Run) -> None:
    found = results(record)
    if found:
        _show_models(options, record, found)
        with figures.style():
            figures.save(draw(options, record, found), record.directory, "language_model")
    decoded = record.select(kind="decode")
    if decoded:
        _show_decoding(record, decoded)
        layers = f"{options.layers} layer{'' if options.layers == 1 else 's'}"
        title = (f"A language model of {layers}, {options.hidden_size} channels, "
                 f"{options.dtype}")  # fmt: skip
        with figures.style():
            figures.save(decoding.draw(decoded, title), record.directory, "decoding")


def _show_models(
    options: LanguageModel, record: Run, found: Mapping[str, tuple[Row, list[Row]]]
) -> None:
    record.write_table(
        {"arm": name, "parameters": row["parameters"],
         **{key: lane[key] for key in ("seed", "rate", "bits")}}
        for name, (row, lanes) in found.items() for lane in lanes
    )  # fmt: skip
    # A lane that diverged is recorded as "nan".
    base = {x["seed"]: float(x["bits"]) for x in found["delta"][1]} if "delta" in found else {}
    cells = []
    for name, (row, lanes) in found.items():
        gaps = [float(x["bits"]) - base[x["seed"]] for x in lanes if base and name != "delta"]
        bits = spread((lane["bits"] for lane in lanes), 4)
        step = human_seconds(row["seconds_per_step"]) if row["seconds_per_step"] else "-"
        cells.append([MODELS[name].label, f"{row['parameters']:,}", bits,
                      spread(gaps, 4) if gaps else "", step])  # fmt: skip
    text = record.find(kind="text")
    tokens = options.steps * options.batch_size * options.length
    title = (f"Held-out bits per byte after {tokens:,} bytes of {text['source']}; "
             f"mean, least and greatest of {options.seeds} seeds")  # fmt: skip
    columns = ["model", "parameters", "bits per byte", "beyond DeltaNet", "step, all seeds"]
    console.print(make_table(title, columns, cells))
    if "delta" in found:
        written = bytes(found["delta"][1][0]["sample"]).decode("utf-8", "backslashreplace")
        (record.directory / "sample.txt").write_text(written, encoding="utf-8")
        console.print("written by DeltaNet from its recurrent cache:", style="bold")
        console.print(written, markup=False)


def _show_decoding(record: Run, rows: Sequence[Row]) -> None:
    record.write_table(rows, "decoding.csv")
    cells = [
        [decoding.LOOKS[r["memory"]][0], r["context"], human_seconds(r["seconds"]),
         human_bytes(r["bytes"])]
        for r in rows
    ]  # fmt: skip
    title = f"One more token, sequences at once: {rows[0]['batch']}"
    columns = ["cache", "context (tokens)", "time per token", "bytes per sequence"]
    console.print(make_table(title, columns, cells))


def draw(options: LanguageModel, record: Run, found: Mapping[str, tuple[Row, list[Row]]]) -> Figure:
    """Losses in training, held-out bits of arms and ablations, and bits by context."""
    fig, axes = figures.figure(2, 2, panel=(3.6, 2.8))
    (curves, held_out), (context, details) = axes
    arms = {name: found[name] for name in options.arms if name in found}
    for name, (row, lanes) in arms.items():
        _draw_curve(curves, options, record, name, lanes, len(row["lanes"]))
        _draw_context(context, options, name, lanes)
    curves.set(title="In training", xlabel="step", ylabel="bits per byte")
    figures.powers_of_two_axis(context, "bytes of context", _contexts(options.length))
    context.set(title="Held out, by context", ylabel="bits per byte")
    curves.legend(loc="upper right")
    _draw_points(held_out, {n: lanes for n, (_, lanes) in arms.items()}, {})
    held_out.set(title="Held out", xlabel="bits per byte")
    kept = [n for n in ("delta", *options.ablations) if n in found]
    _draw_points(details, {n: found[n][1] for n in kept}, {"delta": "SiLU, L2 (DeltaNet)"})
    details.set(title="DeltaNet, details changed", xlabel="bits per byte, held out")
    figures.letter(axes.flat)
    return fig


def _band(ax: Axes, x: Sequence[float], ys: np.ndarray, arm: Arm) -> None:
    """The mean over seeds as a line, least to greatest as a band."""
    color = PALETTE[arm.color]
    ax.fill_between(x, ys.min(0), ys.max(0), color=color, alpha=0.13, lw=0)
    ax.plot(x, ys.mean(0), color=color, marker=arm.marker, ms=3.5, lw=1.2, label=arm.label,
            markevery=max(1, len(x) // 8))  # fmt: skip


def _draw_curve(
    ax: Axes, options: LanguageModel, record: Run, name: str, lanes: Sequence[Row], count: int
) -> None:
    """Draw losses against steps; of a block repeated after a kill, its last row counts."""
    rows = {row["step"]: row["loss"] for row in record.select(kind="train", arm=name)}
    steps = sorted(rows)
    rates = count // options.seeds
    kept = [i for i in range(count) if options.rates[i % rates] == lanes[0]["rate"]]
    ys = np.asarray([rows[step] for step in steps], float)[:, kept].T
    _band(ax, steps, bits_per_token(ys), MODELS[name])


def _draw_context(ax: Axes, options: LanguageModel, name: str, lanes: Sequence[Row]) -> None:
    x = _contexts(options.length)
    bits = np.asarray([lane["by_position"] for lane in lanes], float)
    _band(ax, x, bits[:, -len(x) :], MODELS[name])


def _contexts(length: int) -> list[int]:
    """Where the ranges that are drawn begin, in bytes of context."""
    # Fewer than four bytes say more of the language than of the memory.
    starts = [a + 1 for a, _ in _ranges(length)]
    return starts[min(2, len(starts) - 1) :]


def _draw_points(
    ax: Axes, lanes_of: Mapping[str, Sequence[Row]], labels: Mapping[str, str]
) -> None:
    """A row per model: every seed as a point, the mean as a bar across."""
    for place, (name, lanes) in enumerate(lanes_of.items()):
        arm, values = MODELS[name], [float(lane["bits"]) for lane in lanes]
        ax.plot(values, [place] * len(values), arm.marker, color=PALETTE[arm.color], mfc="none")
        ax.plot([np.mean(values)] * 2, [place - 0.3, place + 0.3], color=PALETTE[arm.color])
        ax.annotate(f"{np.mean(values):.3f}", (np.nanmax(values), place), xytext=(6, 0),
                    textcoords="offset points", va="center", fontsize=7.5)  # fmt: skip
    ax.set_yticks(range(len(lanes_of)), [labels.get(n, MODELS[n].label) for n in lanes_of])
    ax.set_ylim(len(lanes_of) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    # Room for the number to the right of the last row's points.
    low, high = ax.get_xlim()
    ax.set_xlim(low, high + 0.18 * (high - low))
    ax.locator_params(axis="x", nbins=6)
