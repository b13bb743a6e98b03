"""The mixers of Qwen3-Next: round trips, the order of fused rows, everything wrong at once."""

import json

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from deltanet_jax import DeltaNet
from deltanet_jax.convert import load_qwen3_next, save_qwen3_next
from tests.convert.directories import CONFIGS, assert_identical, random_tensors, read, write

CONFIG = CONFIGS["qwen3_next"]
OTHERS = {
    "model.layers.3.self_attn.q_proj.weight": np.zeros((2, 2), np.float32),
    "model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((2, 2), np.float32),
}


def mixer(**change):
    options = {
        "gate": "scalar",
        "num_v_heads": 4,
        "expand_v": 0.5,
        "head_dim": 6,
        "use_output_gate": True,
    }
    return DeltaNet(16, 2, rngs=nnx.Rngs(0), **(options | change))


@pytest.mark.parametrize("shards", [1, 2])
def test_their_tensors_come_back_bit_for_bit(tmp_path, shards):
    tensors = random_tensors("qwen3_next")
    mixers = load_qwen3_next(write(tmp_path / "theirs", CONFIG, tensors | OTHERS, shards))
    assert list(mixers) == [0, 1, 2]
    save_qwen3_next(mixers, tmp_path / "back")
    assert_identical(read(tmp_path / "back"), tensors)
    again = load_qwen3_next(tmp_path / "back")
    for i, layer in mixers.items():
        chex.assert_trees_all_equal(
            nnx.to_pure_dict(nnx.state(again[i])), nnx.to_pure_dict(nnx.state(layer))
        )


def test_what_is_not_read_may_be_quantised_or_elsewhere(tmp_path):
    tensors = random_tensors("qwen3_next")
    others = {f"model.layers.0.mlp.{n}": np.zeros(2, n) for n in ("uint8", "int32", "bool")}
    assert list(load_qwen3_next(write(tmp_path / "x", CONFIG, tensors | others))) == [0, 1, 2]
    path = write(tmp_path / "y", CONFIG, tensors)
    places = {n: f"layer{n.split('.')[2]}.safetensors" for n in tensors}
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    first = {n: x for n, x in tensors.items() if places[n] == "layer0.safetensors"}
    save_file(first, path / "layer0.safetensors")
    assert list(load_qwen3_next(path, layers=[0])) == [0]
    with pytest.raises(ValueError, match=r"the file layer1\.safetensors of the index is missing"):
        load_qwen3_next(path, layers=[0, 1])


def test_16_bit_tensors_stay_16_bit(tmp_path):
    tensors = random_tensors("qwen3_next", "bfloat16")
    mixers = load_qwen3_next(write(tmp_path / "theirs", CONFIG, tensors))
    assert mixers[0].q_proj.kernel[...].dtype == jnp.bfloat16
    assert mixers[0].decay.A_log[...].dtype == jnp.float32
    save_qwen3_next(mixers, tmp_path / "back", dtype="bfloat16")
    assert_identical(read(tmp_path / "back"), tensors)


def test_fused_rows_are_grouped_by_key_head(tmp_path):
    tensors = random_tensors("qwen3_next")
    layer = load_qwen3_next(write(tmp_path / "x", CONFIG, tensors), layers=[1])[1]
    prefix = "model.layers.1.linear_attn."
    fused, ba = (tensors[f"{prefix}in_proj_{name}.weight"] for name in ("qkvz", "ba"))
    # Of each of two key heads: 6 rows of q, 6 of k, 2 value heads of 3 rows, as many of z.
    kernels = {n: np.asarray(getattr(layer, f"{n}_proj").kernel[...]).T for n in "qkvgba"}
    for head in range(2):
        rows = fused[24 * head :]
        np.testing.assert_array_equal(kernels["q"][6 * head :][:6], rows[:6])
        np.testing.assert_array_equal(kernels["k"][6 * head :][:6], rows[6:12])
        np.testing.assert_array_equal(kernels["v"][6 * head :][:6], rows[12:18])
        np.testing.assert_array_equal(kernels["g"][6 * head :][:6], rows[18:24])
        np.testing.assert_array_equal(kernels["b"][2 * head :][:2], ba[4 * head :][:2])
        np.testing.assert_array_equal(kernels["a"][2 * head :][:2], ba[4 * head + 2 :][:2])
    taps = tensors[f"{prefix}conv1d.weight"][:, 0].T
    np.testing.assert_array_equal(layer.k_conv.kernel[...], taps[:, 12:24])


def test_everything_wrong_is_in_one_error(tmp_path):
    tensors = random_tensors("qwen3_next")
    prefix = "model.layers.2.linear_attn."
    tensors[f"{prefix}conv1d.bias"] = np.zeros(36, np.float32)
    tensors[f"{prefix}norm.weight"] = np.zeros(6, np.float32)
    del tensors[f"{prefix}dt_bias"]
    path = write(tmp_path / "x", CONFIG | {"hidden_act": "gelu"}, tensors)
    with pytest.raises(ValueError, match="cannot be converted") as error:
        load_qwen3_next(path)
    for words in (
        "`hidden_act` is 'gelu'",
        f"{prefix}conv1d.bias is unknown, shape (36,)",
        f"{prefix}norm.weight has shape (6,), wanted (3,)",
        f"{prefix}dt_bias is missing, shape (4,)",
    ):
        assert words in str(error.value), words


@pytest.mark.parametrize(
    ("change", "layers", "message"),
    [
        ({"model_type": "qwen3"}, None, "`model_type` must be qwen3_next; got 'qwen3'"),
        ({"linear_num_value_heads": 3}, None, "`num_v_heads`"),
        ({}, [3], r"`layers` must be among \[0, 1, 2\]; got \[3\]"),
        ({"layer_types": ["full_attention", "linear_attention"]}, [0], r"among \[1\]; got \[0\]"),
    ],
)
def test_bad_configs_are_refused_by_name(tmp_path, change, layers, message):
    path = write(tmp_path / "x", CONFIG | change, random_tensors("qwen3_next"))
    with pytest.raises(ValueError, match=message):
        load_qwen3_next(path, layers=layers)


def test_a_config_without_the_shapes_says_which(tmp_path):
    path = write(tmp_path / "x", {"model_type": "qwen3_next"}, random_tensors("qwen3_next"))
    with pytest.raises(ValueError, match="config.json has no `hidden_size`"):
        load_qwen3_next(path)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"allow_neg_eigval": True}, "allow_neg_eigval"),
        ({"use_output_gate": False}, "use_output_gate"),
        ({"conv_size": None}, "conv_size"),
        ({"gate": "vector"}, "gate"),
    ],
)
def test_mixers_that_theirs_cannot_be_are_refused_and_nothing_is_written(tmp_path, change, name):
    with pytest.raises(ValueError, match=f"layer 0: `{name}`"):
        save_qwen3_next({0: mixer(**change)}, tmp_path / "out")
    with pytest.raises(ValueError, match=r"layer 1: `norm_eps` is 0\.001"):
        save_qwen3_next({0: mixer(), 1: mixer(norm_eps=1e-3)}, tmp_path / "out")
    with pytest.raises(ValueError, match="at least one"):
        save_qwen3_next({}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
