"""Compare the cache of a decoder: a recurrent state, and the keys and values of softmax attention.

Bytes are those of actual arrays: the cache that a layer starts with, the state that
`normalized_linear_attention` returns, and keys and values of `L` tokens. A state of `d x d`
floats equals the `2 L d` floats of keys and values at `L = d/2`; with the normaliser's column
at `L = (d + 1)/2`; a float32 state beside 16-bit keys and values at `L = d`. All this per
head: a layer of several heads of size `d` crosses at the same `L`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from matplotlib.figure import Figure

from deltanet_jax import DeltaNet, normalized_linear_attention
from experiments import figures
from experiments.figures import PALETTE
from experiments.record import Row, Run
from experiments.tables import console, human_bytes, make_table

__all__ = ["CacheSize", "run"]


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a recurrent cache against keys and values, and where they cross (exact, seconds)."""

    head_dims: tuple[int, ...] = (32, 64, 128, 256)
    """Sizes d of a head's keys and of its values."""
    heads: int = 4
    """Heads of the layer; the crossover does not depend on it."""
    conv_size: int = 4
    """Taps of the layer's short convolutions, whose inputs are part of its cache."""
    longest: int = 4096
    """Tokens up to which keys and values are stored; a power of two."""
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """Where run directories go."""
    name: str | None = None
    """Name of the run directory; the time by default."""


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def key_value_cache(heads: int, d: int, tokens: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Count bytes that softmax attention stores after `tokens` tokens of one sequence."""
    shape = (1, tokens, heads, d)
    return {"keys": jnp.zeros(shape, dtype), "values": jnp.zeros(shape, dtype)}


def state_bytes(heads: int, d: int, conv_size: int) -> dict[str, int]:
    """Bytes of the recurrent caches of one layer and one sequence."""
    # Parameters take no part here, so only their shapes are made; the cache is of real arrays.
    layer = nnx.eval_shape(
        lambda: DeltaNet(heads * d, heads, conv_size=conv_size, rngs=nnx.Rngs(0))
    )
    cache = layer.init_cache(1)
    token = jnp.ones((1, 1, heads, d))
    normalised = normalized_linear_attention(token, token, token)[1]
    return {
        "state": tree_bytes(cache.state),
        "state + normaliser": tree_bytes(normalised),
        "state + convolutions": tree_bytes(cache),
    }


# What is compared: the recurrent side, the dtype of keys and values, the predicted crossover.
PAIRS = {
    "state / float32 KV": ("state", jnp.float32, lambda d: d / 2),
    "state + normaliser / float32 KV": ("state + normaliser", jnp.float32, lambda d: (d + 1) / 2),
    "state / bfloat16 KV": ("state", jnp.bfloat16, lambda d: 1.0 * d),
}


def crossover(state: int, heads: int, d: int, dtype: jnp.dtype) -> float:
    """Tokens whose keys and values take `state` bytes, by the bytes of one more token."""
    first, second = (tree_bytes(key_value_cache(heads, d, n, dtype)) for n in (1, 2))
    return state / (second - first)


def first_larger(state: int, heads: int, d: int, dtype: jnp.dtype, guess: float) -> int:
    """Search the first number of tokens whose keys and values are larger than the state."""
    tokens = max(1, int(guess) - 3)
    while tree_bytes(key_value_cache(heads, d, tokens, dtype)) <= state:
        tokens += 1
    return tokens


def measure(options: CacheSize) -> list[Row]:
    """Bytes of states, of keys and values, and crossovers."""
    rows: list[Row] = []
    lengths = [2**n for n in range(int(np.log2(options.longest)) + 1)]
    for d in options.head_dims:
        states = state_bytes(options.heads, d, options.conv_size)
        rows += [{"kind": "state", "d": d, "what": what, "bytes": n} for what, n in states.items()]
        for dtype in (jnp.float32, jnp.bfloat16):
            for L in lengths:
                size = tree_bytes(key_value_cache(options.heads, d, L, dtype))
                name = jnp.dtype(dtype).name
                rows.append({"kind": "kv", "d": d, "dtype": name, "tokens": L, "bytes": size})
        for pair, (what, dtype, predicted) in PAIRS.items():
            crossing = crossover(states[what], options.heads, d, dtype)
            rows.append(
                {
                    "kind": "crossover",
                    "d": d,
                    "what": pair,
                    "tokens": crossing,
                    "predicted": predicted(d),
                    "first_larger": first_larger(states[what], options.heads, d, dtype, crossing),
                }
            )
    return rows


def run(options: CacheSize) -> Run:
    """Measure, and write the record, the table and the figure."""
    with Run.start("cache-size", options, options.results, options.name) as record:
        for row in measure(options):
            record.write(row)
        record.write_table(record.rows)
        with figures.style():
            figures.save(draw(options, record.rows), record.directory, "cache_size")
        crossings = record.select(kind="crossover")
        rows = [
            (r["what"], r["d"], human_bytes(record.find(kind="state", d=r["d"],
             what=r["what"].partition(" / ")[0])["bytes"]), f"{r['predicted']:g}",
             f"{r['tokens']:g}", r["first_larger"])
            for r in crossings
        ]  # fmt: skip
        columns = [
            "compared",
            "d",
            "state",
            "predicted L (tokens)",
            "equal at L",
            "KV larger from L",
        ]
        console.print(make_table(f"One layer, {options.heads} heads of size d", columns, rows))
        console.print(f"record: {record.directory}")
    return record


def draw(options: CacheSize, rows: Sequence[Row]) -> Figure:
    """Bytes against tokens for one head size, and crossovers against head sizes."""
    fig, axes = figures.figure(1, 2, panel=(3.6, 2.9))
    size, crossing = axes.flat
    d = 64 if 64 in options.head_dims else options.head_dims[0]
    for dtype, color in (("float32", "red"), ("bfloat16", "orange")):
        kv = [r for r in rows if r["kind"] == "kv" and r["d"] == d and r["dtype"] == dtype]
        x, y = [r["tokens"] for r in kv], [r["bytes"] for r in kv]
        size.loglog(x, y, color=PALETTE[color], label=f"keys and values, {dtype}")
    looks = {
        "state": ("blue", "-"),
        "state + normaliser": ("sky", "--"),
        "state + convolutions": ("green", "-."),
    }
    for what, (color, line) in looks.items():
        (y,) = (r["bytes"] for r in rows
                if r["kind"] == "state" and r["d"] == d and r["what"] == what)  # fmt: skip
        size.axhline(y, color=PALETTE[color], ls=line, label=f"{what}, float32")
    figures.bytes_axis(size, "bytes per layer and sequence")
    figures.powers_of_two_axis(size, "tokens L", [1, 8, 64, 512, 4096])
    pair = next(r for r in rows if r["kind"] == "crossover" and r["d"] == d)
    size.annotate(
        f"L = {pair['tokens']:g}", (pair["tokens"], y), xytext=(0, -26),
        textcoords="offset points", fontsize=7.5, ha="left",
        arrowprops={"arrowstyle": "-", "lw": 0.7},
    )  # fmt: skip
    size.set(title=f"Cache of {options.heads} heads, d = {d}")
    size.legend(loc="upper left")
    size.set_ylim(None, 30 * max(r["bytes"] for r in rows if r["kind"] == "kv" and r["d"] == d))
    _draw_crossovers(crossing, options.head_dims, rows)
    figures.letter(axes.flat)
    return fig


def _draw_crossovers(ax: figures.Axes, head_dims: Sequence[int], rows: Sequence[Row]) -> None:
    looks = (("blue", "o", "d/2"), ("sky", "x", "(d+1)/2"), ("orange", "s", "d"))
    xs = np.geomspace(min(head_dims), max(head_dims), 50)
    for (pair, (*_, predicted)), (color, marker, name) in zip(PAIRS.items(), looks, strict=True):
        points = [r for r in rows if r["kind"] == "crossover" and r["what"] == pair]
        ax.plot(xs, predicted(xs), color=PALETTE[color], lw=0.9)
        x, y = [r["d"] for r in points], [r["tokens"] for r in points]
        ax.plot(x, y, marker, color=PALETTE[color], mfc="none", label=f"{pair}: {name}")
    figures.powers_of_two_axis(ax, "head size d", head_dims)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(figures.FuncFormatter(lambda y, _: f"{y:g}"))
    ax.set(title="Crossover", ylabel="tokens L of equal bytes")
    ax.set_ylim(None, 4 * max(head_dims))
    ax.legend(loc="upper left")
