"""Directories of flash-linear-attention: round trips, older layouts, everything wrong at once."""

import json
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deltanet_jax.convert import files, load_fla, save_fla
from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from tests.convert.directories import CONFIGS, assert_identical, random_tensors, read, write

KINDS = ("delta_net", "gated_deltanet")
OURS = DeltaNetConfig(vocab_size=11, hidden_size=8, num_layers=1, num_heads=2, mlp_size=12)
EXPRESSIBLE = {
    "default": {},
    "default-mlp": {"mlp_size": None},
    "bare": {"conv_size": None, "use_beta": False, "feature_map": "relu", "qk_norm": "sum"},
    "heads": {"head_dim": 6, "expand_v": 1.5, "tie_embeddings": True, "allow_neg_eigval": True},
    "gate": {"use_output_gate": True, "feature_map": "elu", "norm_eps": 1e-3, "conv_size": 2},
    "scalar": {"gate": "scalar", "num_v_heads": 4, "expand_v": 2.0, "use_output_gate": True},
    "sigmoid": {
        "gate": "scalar",
        "use_output_gate": True,
        "output_gate_activation": "sigmoid",
        "param_dtype": "bfloat16",
    },
}


def parameters(model):
    return nnx.to_pure_dict(nnx.state(model))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_their_tensors_come_back_bit_for_bit(tmp_path, kind, shards):
    tensors = random_tensors(kind)
    source = write(tmp_path / "theirs", CONFIGS[kind], tensors, shards)
    save_fla(load_fla(source), tmp_path / "back")
    assert_identical(read(tmp_path / "back"), tensors)
    again = json.loads((tmp_path / "back" / "config.json").read_text())
    for name, value in CONFIGS[kind].items():
        assert name == "bos_token_id" or again[name] == value, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_tensors_stay_16_bit(tmp_path, kind, dtype):
    tensors = random_tensors(kind, dtype)
    model = load_fla(write(tmp_path / "theirs", CONFIGS[kind], tensors))
    assert model.config.param_dtype == dtype
    save_fla(model, tmp_path / "wide-gates")
    wide = {
        n: x.astype(np.float32) if n.endswith(("A_log", "dt_bias")) else x
        for n, x in tensors.items()
    }
    assert_identical(read(tmp_path / "wide-gates"), wide)
    save_fla(model, tmp_path / "back", dtype=dtype)
    assert_identical(read(tmp_path / "back"), tensors)


def test_tensors_of_several_dtypes_are_held_exactly(tmp_path):
    tensors = random_tensors("delta_net", "bfloat16")
    norm = random_tensors("delta_net")["model.norm.weight"]
    path = write(tmp_path / "x", CONFIGS["delta_net"], tensors | {"model.norm.weight": norm})
    model = load_fla(path)
    assert model.config.param_dtype == "float32"
    np.testing.assert_array_equal(model.norm.scale[...], norm)
    narrow = load_fla(path, param_dtype="bfloat16", dtype="float32")
    assert (narrow.config.param_dtype, narrow.config.dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize("change", EXPRESSIBLE.values(), ids=EXPRESSIBLE)
def test_our_models_come_back_the_same(tmp_path, change):
    config = DeltaNetConfig.from_dict(OURS.to_dict() | change)
    model = DeltaNetLM(config, rngs=nnx.Rngs(0))
    save_fla(model, tmp_path / "out", max_shard_bytes=700)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    back = load_fla(tmp_path / "out", implementation="recurrent")
    assert back.config == config
    chex.assert_trees_all_equal_shapes_and_dtypes(parameters(back), parameters(model))
    chex.assert_trees_all_equal(parameters(back), parameters(model))
    tokens = jax.random.randint(jax.random.key(0), (1, 5), 0, config.vocab_size)
    if config.param_dtype == "float32":
        np.testing.assert_allclose(back(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_loading_makes_no_random_parameters(tmp_path):
    model = load_fla(write(tmp_path / "x", CONFIGS["delta_net"], random_tensors("delta_net")))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(nnx.state(model)))
    assert isinstance(model.blocks[1].mixer.q_proj.kernel, nnx.Param)
    assert model.blocks[1].mixer.q_proj.kernel.get_metadata()["out_sharding"] == ("embed", "heads")


def test_the_fused_gate_of_older_uploads_is_split(tmp_path):
    tensors = random_tensors("delta_net")
    wanted = load_fla(write(tmp_path / "new", CONFIGS["delta_net"], tensors))
    for i in range(2):
        gate, up = (f"model.layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        tensors[gate] = np.concatenate([tensors[gate], tensors.pop(up)])
    config = CONFIGS["delta_net"] | {"norm_first": False, "fuse_norm": True}
    model = load_fla(write(tmp_path / "old", config, tensors, shards=2))
    chex.assert_trees_all_equal(parameters(model), parameters(wanted))


def test_the_default_mlp_is_theirs(tmp_path):
    config = {n: x for n, x in CONFIGS["delta_net"].items() if n != "intermediate_size"}
    with pytest.raises(ValueError, match=r"mlp.down_proj.weight has shape .*, wanted \(16, 256\)"):
        load_fla(write(tmp_path / "x", config, random_tensors("delta_net")))


def test_a_tied_head_may_be_stored_twice_if_it_is_the_same(tmp_path):
    config = CONFIGS["delta_net"] | {"tie_word_embeddings": True}
    tensors = random_tensors("delta_net")
    with pytest.raises(ValueError, match="differs from model.embeddings.weight"):
        load_fla(write(tmp_path / "two", config, tensors))
    tensors["lm_head.weight"] = tensors["model.embeddings.weight"]
    model = load_fla(write(tmp_path / "one", config, tensors))
    assert model.config.tie_embeddings
    save_fla(model, tmp_path / "back")
    assert "lm_head.weight" not in read(tmp_path / "back")


def test_keys_that_change_nothing_are_accepted(tmp_path):
    config = CONFIGS["delta_net"] | {
        "_attn_implementation_autoset": False,
        "is_decoder": True,
        "max_length": 20,
        "quantization_config": None,
        "norm_first": None,
        "pruned_heads": {},
        "num_v_heads": None,
    }
    load_fla(write(tmp_path / "x", config, random_tensors("delta_net")))


def test_ignored_tensors_may_be_of_any_dtype_or_elsewhere(tmp_path):
    tensors = random_tensors("delta_net")
    path = write(tmp_path / "x", CONFIGS["delta_net"], tensors | {"extra": np.zeros(2, np.uint8)})
    assert load_fla(path, ignore=["extra"]).config.num_layers == 2
    path = write(tmp_path / "y", CONFIGS["delta_net"], tensors, shards=2)
    index = path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"] | {"extra": "missing.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    assert load_fla(path, ignore=["extra"]).config.num_layers == 2


def test_everything_wrong_is_in_one_error(tmp_path):
    tensors = random_tensors("gated_deltanet")
    tensors["model.layers.0.attn.D"] = np.zeros(4, np.float32)
    tensors["model.layers.1.attn.A_log"] = np.zeros(5, np.float32)
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = np.zeros((19, 16), np.int8)
    config = CONFIGS["gated_deltanet"] | {
        "attn": {"layers": [0]},
        "attnres_block_size": 2,
        "hidden_act": "powlu",
        "rotations": 3,
    }
    path = write(tmp_path / "x", config, tensors)
    with pytest.raises(ValueError, match="cannot be converted") as error:
        load_fla(path)
    for words in (
        "`attn` is {'layers': [0]}",
        "`attnres_block_size` is 2",
        "`hidden_act` is 'powlu'",
        "`rotations` is an unknown option: 3",
        "model.layers.0.attn.D is unknown, shape (4,)",
        "model.layers.1.attn.A_log has shape (5,), wanted (4,)",
        "model.norm.weight is missing, shape (16,)",
        "lm_head.weight has dtype I8",
    ):
        assert words in str(error.value), words


def test_what_is_to_be_ignored_is_not_seen(tmp_path):
    tensors = random_tensors("gated_deltanet") | {"model.layers.0.attn.D": np.zeros(4, np.float32)}
    path = write(tmp_path / "x", CONFIGS["gated_deltanet"] | {"rotations": 3}, tensors)
    model = load_fla(path, ignore=["*.attn.D", "rotations"])
    assert model.config.gate == "scalar"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "`model_type` must be one of delta_net, gated_deltanet"),
        ({"expand_k": 0.3}, "`expand_k` times `hidden_size`"),
        ({"num_heads": None}, "`num_heads` must be an integer in [1, 2147483647]; got None"),
        ({"use_short_conv": "no"}, "`use_short_conv` must be True or False; got 'no'"),
        ({"qk_activation": "softmax"}, "`qk_activation` is 'softmax'"),
        ({"norm_first": True}, "`norm_first` is True"),
        ({"hidden_size": -16}, "-16"),
    ],
)
def test_bad_configs_are_refused_by_name(tmp_path, change, message):
    path = write(tmp_path / "x", CONFIGS["delta_net"] | change, random_tensors("delta_net"))
    with pytest.raises(ValueError, match="cannot be converted") as error:
        load_fla(path)
    assert message in str(error.value)


def test_broken_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        load_fla(tmp_path)
    path = write(tmp_path / "x", CONFIGS["delta_net"], random_tensors("delta_net"), shards=3)
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    (path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be converted") as error:
        load_fla(path)
    assert "model-00002-of-00003.safetensors cannot be read" in str(error.value)
    assert "the file model-00003-of-00003.safetensors of the index is missing" in str(error.value)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_fla(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_fla(path)


def test_an_index_and_its_files_must_agree(tmp_path):
    path = write(tmp_path / "x", CONFIGS["delta_net"], random_tensors("delta_net"), shards=2)
    index = path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    places["model.norm.weight"] = places.pop("lm_head.weight")
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match="lm_head.weight is in .* but not in the index"):
        load_fla(path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="has no `weight_map`"):
        load_fla(path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/x.safetensors", 3, ["a"]])
def test_an_index_names_files_of_its_own_directory(tmp_path, name):
    path = write(tmp_path / "x", CONFIGS["delta_net"], random_tensors("delta_net"), shards=2)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ValueError, match="must name files of this directory"):
        load_fla(path)


def test_float64_is_not_rounded_silently(tmp_path):
    tensors = {n: x.astype(np.float64) for n, x in random_tensors("delta_net").items()}
    path = write(tmp_path / "x", CONFIGS["delta_net"], tensors)
    with pytest.raises(ValueError, match="jax_enable_x64"):
        load_fla(path)
    assert load_fla(path, param_dtype="float32").config.param_dtype == "float32"
    with jax.enable_x64(True):
        assert load_fla(path).norm.scale[...].dtype == jnp.float64


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"gate": "vector"}, ["gate"]),
        ({"feature_map": "dpfp", "qk_norm": "none"}, ["feature_map", "qk_norm"]),
        ({"num_v_heads": 4}, ["num_v_heads"]),
        (
            {"gate": "scalar", "use_beta": False, "feature_map": "relu", "qk_norm": "sum"},
            ["use_beta", "feature_map", "qk_norm"],
        ),
        (
            {"use_output_gate": True, "output_gate_activation": "sigmoid"},
            ["output_gate_activation"],
        ),
    ],
)
def test_models_that_theirs_cannot_say_are_refused_and_nothing_is_written(tmp_path, change, names):
    model = DeltaNetLM(DeltaNetConfig.from_dict(OURS.to_dict() | change), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="cannot be converted") as error:
        save_fla(model, tmp_path / "out")
    assert all(f"`{name}`" in str(error.value) for name in names)
    assert list(tmp_path.iterdir()) == []


def test_extra_config_is_written_and_cannot_contradict_the_model(tmp_path):
    model = DeltaNetLM(OURS, rngs=nnx.Rngs(0))
    save_fla(model, tmp_path / "out", extra={"eos_token_id": 2})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    with pytest.raises(ValueError, match="`extra` sets `num_heads`"):
        save_fla(model, tmp_path / "other", extra={"num_heads": 3})
    with pytest.raises(ValueError, match="`max_shard_bytes`"):
        save_fla(model, tmp_path / "other", max_shard_bytes=0)


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    model, written = DeltaNetLM(OURS, rngs=nnx.Rngs(0)), []

    def fail_at_the_third(arrays, path, **kwargs):
        written.append(path)
        if len(written) == 3:
            raise OSError("disk full")
        save_file(arrays, path, **kwargs)

    save_file = files.save_file
    monkeypatch.setattr(files, "save_file", fail_at_the_third)
    with pytest.raises(OSError, match="disk full"):
        save_fla(model, tmp_path / "out", max_shard_bytes=700)
    assert len(written) == 3
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path, monkeypatch):
    """The number of a process comes again, and used to be the whole name of the directory."""
    monkeypatch.setattr(files.os, "getpid", lambda: 7)
    (tmp_path / ".out.7.unfinished").mkdir()
    for name in ("out", "again"):
        save_fla(DeltaNetLM(OURS, rngs=nnx.Rngs(0)), tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == [".out.7.unfinished", "again", "out"]


def test_what_exists_is_never_touched(tmp_path):
    model = DeltaNetLM(OURS, rngs=nnx.Rngs(0))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="nothing was written"):
        save_fla(model, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["notes"]
