"""Small directories as flash-linear-attention and Qwen3-Next write them, with random tensors."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

# What their configs say, and the shapes of the tensors that they then hold.
DELTA_NET = {
    "model_type": "delta_net",
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "expand_k": 0.5,
    "expand_v": 1.5,
    "conv_size": 3,
    "intermediate_size": 20,
    "norm_eps": 1e-6,
    "bos_token_id": 1,
}
GATED_DELTANET = {
    "model_type": "gated_deltanet",
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "num_v_heads": 4,
    "head_dim": 6,
    "expand_v": 0.5,
    "intermediate_size": 20,
    "norm_eps": 1e-5,
    "output_gate_activation": "sigmoid",
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 4,
}


def _shared(mixer: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    shapes = {"model.embeddings.weight": (19, 16), "model.norm.weight": (16,)}
    shapes["lm_head.weight"] = (19, 16)
    for i in range(2):
        layer = {
            "attn_norm.weight": (16,),
            "mlp_norm.weight": (16,),
            "mlp.gate_proj.weight": (20, 16),
            "mlp.up_proj.weight": (20, 16),
            "mlp.down_proj.weight": (16, 20),
        } | {f"attn.{name}": shape for name, shape in mixer.items()}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


SHAPES = {
    "delta_net": _shared(
        {
            "q_proj.weight": (8, 16),
            "k_proj.weight": (8, 16),
            "v_proj.weight": (24, 16),
            "b_proj.weight": (2, 16),
            "q_conv1d.weight": (8, 1, 3),
            "k_conv1d.weight": (8, 1, 3),
            "v_conv1d.weight": (24, 1, 3),
            "o_norm.weight": (12,),
            "o_proj.weight": (16, 24),
        }
    ),
    "gated_deltanet": _shared(
        {
            "q_proj.weight": (12, 16),
            "k_proj.weight": (12, 16),
            "v_proj.weight": (12, 16),
            "a_proj.weight": (4, 16),
            "b_proj.weight": (4, 16),
            "g_proj.weight": (12, 16),
            "A_log": (4,),
            "dt_bias": (4,),
            "q_conv1d.weight": (12, 1, 4),
            "k_conv1d.weight": (12, 1, 4),
            "v_conv1d.weight": (12, 1, 4),
            "o_norm.weight": (3,),
            "o_proj.weight": (16, 12),
        }
    ),
    "qwen3_next": {
        f"model.layers.{i}.linear_attn.{name}": shape
        for i in range(3)
        for name, shape in {
            "in_proj_qkvz.weight": (48, 16),
            "in_proj_ba.weight": (8, 16),
            "conv1d.weight": (36, 1, 4),
            "A_log": (4,),
            "dt_bias": (4,),
            "norm.weight": (3,),
            "out_proj.weight": (16, 12),
        }.items()
    },
}
CONFIGS = {c["model_type"]: c for c in (DELTA_NET, GATED_DELTANET, QWEN3_NEXT)}


def random_tensors(kind: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=s).astype(DTYPES[dtype]) for n, s in SHAPES[kind].items()}


def write(path: Path, config: dict, tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A directory, its tensors dealt out over so many files."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    places = {n: names[i % shards] for i, n in enumerate(tensors)}
    for name in names:
        save_file({n: x for n, x in tensors.items() if places[n] == name}, path / name)
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def read(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of every file."""
    return {n: x for file in sorted(path.glob("*.safetensors")) for n, x in load_file(file).items()}


def assert_identical(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """The same names, dtypes and bits."""
    assert sorted(got) == sorted(want)
    for name, x in want.items():
        assert got[name].dtype == x.dtype, name
        np.testing.assert_array_equal(got[name], x, err_msg=name)
