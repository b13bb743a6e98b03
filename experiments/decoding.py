"""Time one more token: with a state of constant size, and with a cache of keys and values.

Both models are language models of one shape. The recurrent one has read its context, piece by
piece; keys and values of softmax attention are random numbers, which take as long to attend to.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import Progress

from deltanet_jax.models import DeltaNetConfig
from experiments import figures
from experiments.figures import PALETTE
from experiments.models import make_model
from experiments.record import Row, Run

__all__ = ["Load", "draw", "measure"]

REPEATS = 9
LOOKS = {
    "delta": ("DeltaNet, recurrent cache", "blue", "^"),
    "softmax": ("softmax, keys and values", "black", "o"),
}

Cache = tuple[Any, ...]


class Load(NamedTuple):
    """How much is decoded at a time."""

    batch_size: int
    tokens: int
    """Timed together, and the last of their context."""
    piece: int
    """Tokens of the context that are read at a time."""


def measure(
    record: Run, config: DeltaNetConfig, contexts: Sequence[int], load: Load, bar: Progress
) -> None:
    """A row for each memory and context length that the record does not have yet.

    Raises:
        ValueError: If a context is shorter than the tokens that are timed.
    """
    if min(contexts) < load.tokens:
        raise ValueError(
            f"`contexts` must be at least decode_tokens={load.tokens}; got {min(contexts)}"
        )
    task = bar.add_task("decoding", total=len(LOOKS) * len(contexts), note="")
    for memory in LOOKS:
        run = _recurrent(config, load) if memory == "delta" else partial(_softmax, config, load)
        for context in contexts:
            key = {"kind": "decode", "memory": memory, "context": context}
            if record.find(**key) is None:
                bar.update(task, note=f"{memory}, {context} tokens of context")
                record.write(key | {"batch": load.batch_size} | run(context))
            bar.advance(task)


def _decoder(graph: nnx.GraphDef, load: Load) -> Callable[..., Any]:
    """Greedy tokens from a cache, one after another on the device."""

    def decode(state: nnx.State, cache: Cache, token: jax.Array) -> tuple[Cache, jax.Array]:
        model = nnx.merge(graph, state)

        def one(carry: tuple[Cache, jax.Array], _: None) -> tuple[Any, None]:
            cache, token = carry
            logits, cache = model.extend(token[:, None], cache)
            return (cache, jnp.argmax(logits[:, 0], axis=-1).astype(token.dtype)), None

        return jax.lax.scan(one, (cache, token), length=load.tokens)[0]

    return jax.jit(decode, donate_argnums=1)


def _recurrent(config: DeltaNetConfig, load: Load) -> Callable[[int], Row]:
    """The decoder is compiled once: no shape in it depends on the context."""
    model = make_model(config, "delta", nnx.Rngs(0))
    graph, state = nnx.split(model)
    decode = _decoder(graph, load)

    @partial(jax.jit, donate_argnums=1)
    def read(state: nnx.State, cache: Cache, tokens: jax.Array) -> Cache:
        return nnx.merge(graph, state).read(tokens, cache)[1]

    def run(context: int) -> Row:
        cache, rng = model.init_cache(load.batch_size), np.random.default_rng(context)
        for start in range(0, context - load.tokens, load.piece):
            size = load.batch_size, min(load.piece, context - load.tokens - start)
            cache = read(state, cache, rng.integers(0, config.vocab_size, size, np.int32))
        return _time(decode, state, cache, load, lambda cache: cache)

    return run


def _softmax(config: DeltaNetConfig, load: Load, context: int) -> Row:
    model = make_model(config, "softmax", nnx.Rngs(0))
    graph, state = nnx.split(model)
    keys = jax.random.split(jax.random.key(context), 2 * len(model.blocks))

    def full(index: int) -> Any:
        cache = model.blocks[index].mixer.init_cache(load.batch_size, context)
        k, v = (
            jax.random.normal(keys[2 * index + i], x.shape, x.dtype)
            for i, x in enumerate((cache.keys, cache.values))
        )
        return cache._replace(keys=k, values=v, length=jnp.int32(context - load.tokens))

    def rewind(cache: Cache) -> Cache:
        return tuple(c._replace(length=jnp.int32(context - load.tokens)) for c in cache)

    cache = tuple(full(i) for i in range(len(model.blocks)))
    return _time(_decoder(graph, load), state, cache, load, rewind)


def _time(
    decode: Callable[..., Any],
    state: nnx.State,
    cache: Cache,
    load: Load,
    rewind: Callable[[Cache], Cache],
) -> Row:
    """Seconds per step of one token in every sequence, and the bytes of one sequence's cache."""
    size = _bytes(cache)
    token = jnp.zeros((load.batch_size,), jnp.int32)
    times = []
    for _ in range(REPEATS + 1):
        cache = jax.block_until_ready(rewind(cache))
        begin = time.perf_counter()
        cache, token = jax.block_until_ready(decode(state, cache, token))
        times.append((time.perf_counter() - begin) / load.tokens)
    if _bytes(cache) != size:
        raise ValueError(f"the cache changed from {size} to {_bytes(cache)} bytes")
    low, middle, high = np.percentile(times[1:], [25, 50, 75])  # the first one compiles
    return {
        "seconds": middle,
        "seconds_q25": low,
        "seconds_q75": high,
        "bytes": size / load.batch_size,
    }


def _bytes(cache: Cache) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(cache) if x.ndim)


def draw(rows: Sequence[Row], title: str) -> Figure:
    """Time per token and bytes against the length of the context."""
    fig, axes = figures.figure(1, 2, panel=(3.5, 2.7))
    contexts = sorted({row["context"] for row in rows})
    for ax, name, unit in zip(
        axes.flat, ("seconds", "bytes"), (figures.seconds_axis, figures.bytes_axis), strict=True
    ):
        for memory in LOOKS:
            _line(ax, sorted((r for r in rows if r["memory"] == memory),
                             key=lambda r: r["context"]), name)  # fmt: skip
        unit(ax, "time of a step of one token" if name == "seconds" else "cache of one sequence")
        figures.powers_of_two_axis(ax, "tokens of context", contexts)
        ax.legend(loc="upper left")
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * (high / low) ** 0.25)
    batch = rows[0]["batch"]
    axes[0, 0].set_title("Time" if batch == 1 else f"Time, {batch} sequences at once")
    axes[0, 1].set_title("Memory")
    figures.letter(axes.flat)
    fig.suptitle(title, fontsize=9.5)
    return fig


def _line(ax: Axes, rows: Sequence[Row], name: str) -> None:
    if not rows:
        return
    label, color, marker = LOOKS[rows[0]["memory"]]
    x, y = [r["context"] for r in rows], np.asarray([r[name] for r in rows])
    look = {"color": PALETTE[color], "marker": marker, "label": label}
    if name == "bytes":
        ax.plot(x, y, **look)
        return
    low, high = (np.asarray([r[key] for r in rows]) for key in ("seconds_q25", "seconds_q75"))
    ax.errorbar(x, y, [y - low, high - y], capsize=1.5, elinewidth=0.8, **look)
