"""Wrong input is a ValueError that names the argument, what came and what fits."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deltanet_jax import ChunkwiseDeltaNet, DeltaNet, linear_attention

BAD_OPTIONS = [
    ("hidden_size", {"hidden_size": 0}, "0"),
    ("hidden_size", {"hidden_size": 13}, "13 and 2"),
    ("hidden_size", {"hidden_size": 8.0}, "8.0"),
    ("num_heads", {"num_heads": -1}, "-1"),
    ("num_heads", {"num_heads": True}, "True"),
    ("head_dim", {"head_dim": 0}, "0"),
    ("num_v_heads", {"num_v_heads": 3}, "3 and 2"),
    ("num_v_heads", {"num_v_heads": 1}, "1 and 2"),
    ("expand_v", {"expand_v": 1.3}, "1.3"),
    ("expand_v", {"expand_v": 0}, "0"),
    ("expand_v", {"expand_v": "2"}, "'2'"),
    ("gate", {"gate": "channel"}, "'channel'"),
    ("gate", {"gate": None}, "None"),
    ("use_beta", {"use_beta": 1}, "1"),
    ("allow_neg_eigval", {"allow_neg_eigval": "yes"}, "'yes'"),
    ("use_output_gate", {"use_output_gate": None}, "None"),
    ("output_gate_activation", {"output_gate_activation": "tanh"}, "'tanh'"),
    ("conv_size", {"conv_size": 0}, "0"),
    ("conv_size", {"conv_size": False}, "False"),
    ("feature_map", {"feature_map": "softmax"}, "'softmax'"),
    ("dpfp_nu", {"dpfp_nu": 0}, "0"),
    ("qk_norm", {"qk_norm": "L2"}, "'L2'"),
    ("norm_eps", {"norm_eps": 0.0}, "0.0"),
    ("chunk_size", {"chunk_size": -4}, "-4"),
    ("chunk_size", {"chunk_size": 2.5}, "2.5"),
    ("implementation", {"implementation": "fast"}, "'fast'"),
    ("implementation", {"implementation": ["recurrent", "fast"]}, "'fast'"),
    ("implementation", {"implementation": []}, "none"),
    ("dtype", {"dtype": jnp.int32}, "int32"),
    ("dtype", {"dtype": "float31"}, "float31"),
    ("param_dtype", {"param_dtype": jnp.int8}, "int8"),
    ("param_dtype", {"param_dtype": None}, "None"),
    ("rngs", {"rngs": jax.random.key(0)}, "nnx.Rngs(0)"),
    ("rngs", {"rngs": 0}, "int"),
]


@pytest.mark.parametrize(
    ("name", "kwargs", "came"), BAD_OPTIONS, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_bad_option_is_named(name, kwargs, came):
    options = {"hidden_size": 12, "num_heads": 2, "rngs": nnx.Rngs(0)} | kwargs
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        DeltaNet(**options)
    assert came in str(error.value)


@pytest.fixture(scope="module")
def layer():
    return ChunkwiseDeltaNet(12, 2, rngs=nnx.Rngs(0))


X = np.zeros((2, 5, 12), np.float32)
BAD_CALLS = [
    ("x", {"x": X[0]}, "(5, 12)"),
    ("x", {"x": X[..., :8]}, "(2, 5, 8)"),
    ("x", {"x": X.astype(np.int32)}, "int32"),
    ("x", {"x": X.tolist()}, "list"),
    ("mask", {"mask": np.ones((2, 5), np.int32)}, "int32"),
    ("mask", {"mask": np.ones((5, 2), bool)}, "(5, 2)"),
    ("mask", {"mask": np.ones((2, 5, 1), bool)}, "(2, 5, 1)"),
    ("mask", {"mask": [[True] * 5] * 2}, "list"),
    ("segment_ids", {"segment_ids": np.ones((2, 5))}, "float64"),
    ("segment_ids", {"segment_ids": np.ones((2, 4), int)}, "(2, 4)"),
]


@pytest.mark.parametrize(("name", "kwargs", "came"), BAD_CALLS)
def test_bad_call_is_named(layer, name, kwargs, came):
    x = kwargs.pop("x", X) if "x" in kwargs else X
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        layer(x, **kwargs)
    assert came in str(error.value)


def test_cache_of_another_batch_or_layer_is_refused(layer):
    with pytest.raises(ValueError, match=r"`cache.state`.*\(3, 2, 6, 6\).*\(2, 2, 6, 6\)"):
        layer.extend(X, layer.init_cache(3))
    other = ChunkwiseDeltaNet(12, 2, conv_size=None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"`cache.q_inputs`.*None.*\(2, 3, 12\)"):
        layer.extend(X, other.init_cache(2))
    with pytest.raises(ValueError, match=r"`cache`.*tuple"):
        layer.extend(X, tuple(layer.init_cache(2)))
    with pytest.raises(ValueError, match="`x`"):
        layer.extend(X[0], layer.init_cache(2))
    with pytest.raises(ValueError, match=r"`batch_size`.*0"):
        layer.init_cache(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: DeltaNet(12, 2, rng=nnx.Rngs(0)), r"DeltaNet.__init__\(\).* rngs$"),
        (lambda layer: layer(X, masks=None), "'masks'; its arguments are x, segment_ids, mask$"),
        (lambda layer: layer.extend(X), "'cache'; its arguments are x, cache, mask$"),
    ],
)
def test_calls_that_do_not_fit_name_the_arguments(layer, call, message):
    with pytest.raises(TypeError, match=message):
        call(layer)


def test_help_shows_how_a_layer_is_made(layer):
    parameters = inspect.signature(ChunkwiseDeltaNet).parameters
    assert list(parameters)[:3] == ["hidden_size", "num_heads", "head_dim"]
    assert list(inspect.signature(layer).parameters) == ["x", "segment_ids", "mask"]


def test_time_sharded_explicitly_asks_for_the_context_axis(layer):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 4, 12)), NamedSharding(mesh, P(None, "data")))
        with pytest.raises(ValueError, match="`x` must not be sharded along time.*data.*`context_"):
            layer(x)
        q = x.reshape(2, 4, 2, 6, out_sharding=P(None, "data"))
        with pytest.raises(ValueError, match="`q` must not be sharded along time"):
            linear_attention(q, q, q)


def test_no_tokens_and_no_rows_are_legal(layer):
    start = layer.init_cache(2)
    y, cache = layer.extend(X[:, :0], start, mask=np.ones((2, 0), bool))
    assert y.shape == (2, 0, 12)
    np.testing.assert_array_equal(cache.state, start.state)
    assert layer(X[:, :0], segment_ids=np.ones((2, 0), int)).shape == (2, 0, 12)


def test_zero_inputs_have_finite_gradients(layer):
    dx = jax.grad(lambda x: jnp.sum(layer(x) ** 2))(jnp.asarray(X))
    assert np.all(np.isfinite(dx))
