"""Strict promotion of dtypes, and ranks that may not be promoted: everything traces.

The values are those of the default rules, because nothing but the traced casts differs: one case
of each kind is computed under both.
"""

from collections.abc import Iterator
from functools import partial

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from deltanet_jax import ChunkwiseDeltaNet, linear_attention, step
from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from deltanet_jax.models.training import make_optimizer, next_token_loss, train_step
from tests.cases import IMPLEMENTATIONS, VARIANTS, Inputs, Shape, layer_like

SHAPE = Shape(2, 70, 1, 4, 6, group=2)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def _inputs(variant: str, dtype: str, extra: str) -> Inputs:
    inputs = {name: jnp.asarray(x) for name, x in layer_like(variant, SHAPE).items()}
    inputs |= {name: inputs[name].astype(dtype) for name in ("q", "k", "v")}
    if extra == "segment_ids":
        inputs["segment_ids"] = jnp.repeat(jnp.arange(2), 35)[None] + jnp.zeros((2, 1), int)
    elif extra == "cu_seqlens":
        del inputs["initial_state"]
        inputs = {name: x[:1] for name, x in inputs.items()}
        inputs["cu_seqlens"] = jnp.asarray([0, 1, 40, 70])
    return inputs


def _loss(inputs: Inputs, fixed: Inputs, options: dict) -> jax.Array:
    o, state = linear_attention(**inputs, **fixed, **options)
    return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)


def _gradient(inputs: Inputs, options: dict) -> Inputs:
    fixed = {n: inputs[n] for n in ("segment_ids", "cu_seqlens") if n in inputs}
    floats = {n: x for n, x in inputs.items() if n not in fixed}
    gradients: Inputs = jax.grad(_loss)(floats, fixed, options)
    return gradients


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_operators(implementation: str) -> None:
    """Every variant; packed rows, and float32, for those whose code differs."""
    options = IMPLEMENTATIONS[implementation]
    some = ("linear", "gated_delta", "kda")
    calls = [(variant, "bfloat16", "") for variant in VARIANTS]
    calls += [(variant, "float32", "segment_ids") for variant in some]
    calls += [(variant, "bfloat16", "cu_seqlens") for variant in some]
    for call in calls:
        jax.eval_shape(lambda x: _gradient(x, options), _inputs(*call))


def test_one_token() -> None:
    for variant in VARIANTS:
        inputs = _inputs(variant, "bfloat16", "")
        state = inputs.pop("initial_state")
        token = {name: x[:, 0] for name, x in inputs.items()}
        jax.eval_shape(lambda x, state: step(**x, state=state), token, state)


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_layers(gate: str, dtype: str | None) -> None:
    options = {"dtype": dtype, "allow_neg_eigval": True, "use_output_gate": True, "num_v_heads": 4}
    x, mask = jnp.ones((2, 70, 8)), jnp.ones((2, 70), bool)
    for change in ({}, {"feature_map": "elu", "qk_norm": "sum"}, {"feature_map": "dpfp"}):
        layer = ChunkwiseDeltaNet(8, 2, gate=gate, rngs=nnx.Rngs(0), **options, **change)
        cache = layer.init_cache(2)
        packed = ({"mask": mask}, {"segment_ids": jnp.zeros((2, 70), int)})
        for given in ({}, *(() if change else packed)):
            loss = lambda m, given=given: jnp.sum(m(x, **given).astype(jnp.float32))  # noqa: E731
            jax.eval_shape(lambda m, loss=loss: nnx.grad(loss)(m), layer)
        for T in (1, 5):
            jax.eval_shape(lambda m, c, T=T: m.extend(x[:, :T], c, mask=mask[:, :T]), layer, cache)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_model_and_its_loss(dtype: str | None) -> None:
    config = DeltaNetConfig(
        vocab_size=9, hidden_size=8, num_layers=1, num_heads=2, dtype=dtype, gate="scalar"
    )
    model, tokens = DeltaNetLM(config, rngs=nnx.Rngs(0)), jnp.ones((2, 6), jnp.int32)
    given = {"segment_ids": jnp.zeros((2, 6), int), "mask": jnp.ones((2, 6), bool)}
    jax.eval_shape(lambda m: nnx.grad(partial(next_token_loss, tokens=tokens, **given))(m), model)
    optimizer = make_optimizer(model, 1e-3, total_steps=10)
    jax.eval_shape(lambda m, o: train_step(m, o, tokens), model, optimizer)


def test_the_values_are_those_of_the_default_rules() -> None:
    inputs = _inputs("gated_delta", "bfloat16", "segment_ids")
    got = jax.jit(lambda x: _gradient(x, {"implementation": "chunkwise"}))(inputs)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want = jax.jit(lambda x: _gradient(x, {"implementation": "chunkwise"}))(inputs)
    chex.assert_trees_all_equal(got, want)
