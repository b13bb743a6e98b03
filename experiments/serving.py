"""Continuous batching: tokens per second and memory, for contexts of growing length.

Requests with prompts of very different lengths share a few slots. What the server keeps is one
cache of constant size, so tokens per second in decoding and bytes do not depend on how long the
prompts were; keys and values of softmax attention would grow with them.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro
from flax import nnx

from deltanet_jax.models import DeltaNetConfig, DeltaNetLM, Server
from experiments.record import Row, Run
from experiments.tables import console, human_bytes, make_table

__all__ = ["Serving", "run"]


@dataclass(frozen=True)
class Serving:
    """A continuous-batching loop: tokens per second and bytes by context length (a minute)."""

    contexts: tuple[int, ...] = (64, 256, 1024)
    """Mean tokens of a prompt; each is drawn between half of it and one and a half."""
    slots: int = 8
    """Requests that run at a time."""
    requests: int = 24
    """Requests per context length."""
    num_tokens: int = 32
    """Tokens sampled per request."""
    prefill: int = 64
    """Tokens of a prompt that one step reads."""
    hidden_size: int = 64
    """Channels of the model."""
    num_heads: int = 2
    """Heads of every layer."""
    num_layers: int = 2
    """Layers."""
    vocab_size: int = 256
    """Size of the vocabulary."""
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """Where run directories go."""
    name: str | None = None
    """Name of the run directory; the time by default."""


def measure(options: Serving, model: DeltaNetLM, context: int) -> Row:
    """Serve one load; the first requests, which compile, are not timed."""
    rng = np.random.default_rng(context)
    server = Server(model, options.slots, prefill=options.prefill)
    server.submit(np.zeros(2, int), 2)
    server.run()
    lengths = rng.integers(max(1, context // 2), context * 3 // 2 + 1, options.requests)
    for n in lengths:
        server.submit(rng.integers(0, options.vocab_size, n), options.num_tokens)
    seconds, steps = {"prefill": 0.0, "decode": 0.0}, {"prefill": 0, "decode": 0}
    sampled, size = {"prefill": 0, "decode": 0}, server.cache_bytes
    while server.busy:
        kind = "prefill" if server.reads_prompts else "decode"
        before, start = server.sampled, time.perf_counter()
        server.step()
        seconds[kind] += time.perf_counter() - start
        sampled[kind] += server.sampled - before
        steps[kind] += 1
        if server.cache_bytes != size:
            raise ValueError(f"the cache grew from {size} to {server.cache_bytes} bytes")
    return {
        "context": context,
        "prompt_tokens": int(lengths.sum()),
        "tokens": sum(sampled.values()),
        "tokens_per_second": sum(sampled.values()) / sum(seconds.values()),
        "decode_tokens_per_second": sampled["decode"] / max(seconds["decode"], 1e-9),
        "decode_step_ms": 1e3 * seconds["decode"] / max(1, steps["decode"]),
        "steps": sum(steps.values()),
        "cache_bytes": size,
        "live_bytes": sum(x.nbytes for x in jax.live_arrays()),
    }


def run(options: Serving) -> Run:
    """Serve a load for every context length, and write the record and the table."""
    config = DeltaNetConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        gate="scalar",
    )
    model = DeltaNetLM(config, rngs=nnx.Rngs(0))
    with Run.start("serving", options, options.results, options.name) as record:
        for context in options.contexts:
            record.write(measure(options, model, context))
        record.write_table(record.rows)
        rows = [
            (
                r["context"],
                r["prompt_tokens"],
                f"{r['tokens_per_second']:.0f}",
                f"{r['decode_tokens_per_second']:.0f}",
                f"{r['decode_step_ms']:.2f}",
                human_bytes(r["cache_bytes"]),
                human_bytes(r["live_bytes"]),
            )
            for r in record.rows
        ]
        columns = ["context (tokens)", "prompt tokens", "tokens/s", "decoding (tokens/s)"]
        columns += ["decoding (ms/step)", "cache", "live"]
        console.print(make_table(f"{options.slots} slots", columns, rows))
        console.print(f"record: {record.directory}")
    return record
