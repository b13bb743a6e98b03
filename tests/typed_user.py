"""Code of a user, for a type checker; read by mypy, never run."""

from typing import assert_type

import jax
from flax import nnx

from deltanet_jax import ChunkwiseDeltaNet, DeltaNet, gated_delta_rule, step, why_not
from deltanet_jax.layers import DeltaNetCache
from deltanet_jax.models import DeltaNetConfig, DeltaNetLM, generate
from deltanet_jax.models.training import make_optimizer, train_step


def operators(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> str:
    o, state = gated_delta_rule(q, k, v, g, beta, chunk_size=32, implementation=["chunkwise"])
    assert_type(o, jax.Array)
    _, state = step(q[:, 0], k[:, 0], v[:, 0], state, beta=beta[:, 0])
    assert_type(state, jax.Array)
    gated_delta_rule(q, k, v, g, beta, chunk_sise=32)  # type: ignore[call-arg]
    gated_delta_rule(q, k, v, g)  # type: ignore[call-arg]
    return why_not("pallas", q, k, v, beta=beta) or "it can"


def layers(x: jax.Array) -> tuple[DeltaNet, DeltaNetCache]:
    layer = ChunkwiseDeltaNet(64, num_heads=2, gate="scalar", rngs=nnx.Rngs(0))
    y, cache = layer.extend(x, layer.init_cache(x.shape[0]))
    assert_type(y, jax.Array)
    assert_type(cache.state, jax.Array)
    ChunkwiseDeltaNet(64, num_heads="2", rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    return layer, cache


def models(tokens: jax.Array) -> jax.Array:
    config = DeltaNetConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=2)
    model = DeltaNetLM(config, rngs=nnx.Rngs(0))
    optimizer = make_optimizer(model, 1e-3, total_steps=10)
    metrics = train_step(model, optimizer, tokens)
    assert_type(metrics["loss"], jax.Array)
    return generate(model, tokens, 5, key=jax.random.key(0))
