"""The Gated DeltaNet mixers of Qwen3-Next, without its attention and its experts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from deltanet_jax.convert.files import (
    LazyArray,
    Tensor,
    compare,
    enough_tensors,
    read_config,
    read_tensors,
    refuse,
    shown,
    write_checkpoint,
)
from deltanet_jax.convert.fla import check_x64, exact_dtype
from deltanet_jax.convert.fla_config import check_fields, wrong_type
from deltanet_jax.convert.names import abstract, fill, lazy_arrays, mixer_entries
from deltanet_jax.core import checks
from deltanet_jax.layers.checks import check_dtype
from deltanet_jax.layers.delta_net import DeltaNet
from deltanet_jax.layers.options import LayerOptions
from deltanet_jax.ops.api import Choice

__all__ = ["load_qwen3_next", "save_qwen3_next"]

NEEDED = (
    *("hidden_size", "num_hidden_layers", "hidden_act", "rms_norm_eps"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
# What every mixer of theirs has.
FIXED = {
    "gate": "scalar",
    "use_beta": True,
    "allow_neg_eigval": False,
    "feature_map": "silu",
    "qk_norm": "l2",
    "use_output_gate": True,
    "output_gate_activation": "silu",
}
SIZES = (*(n for n in NEEDED if n not in ("hidden_act", "rms_norm_eps")), "full_attention_interval")
MOST_LAYERS = 10**5
LINEAR, FULL = "linear_attention", "full_attention"


class _Fused(NamedTuple):
    """A tensor there that holds several parameters, group after group of their rows."""

    name: str
    groups: int
    rows: dict[str, int]  # rows of each part in one group

    def split(self, x: np.ndarray) -> dict[str, np.ndarray]:
        parts = x.reshape(self.groups, -1, *x.shape[1:])
        cuts = np.cumsum(list(self.rows.values()))[:-1]
        pieces = np.split(parts, cuts, axis=1)
        return {n: p.reshape(-1, *x.shape[1:]) for n, p in zip(self.rows, pieces, strict=True)}

    def join(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        pieces = [parts[n].reshape(self.groups, -1, *parts[n].shape[1:]) for n in self.rows]
        return np.concatenate(pieces, axis=1).reshape(-1, *pieces[0].shape[2:])


def _fused(o: LayerOptions) -> list[_Fused]:
    """Their tensors in the names of `mixer_entries`, grouped by key head where they are."""
    H, HV, K, V = o.num_heads, o.value_heads, o.key_dim, o.value_dim
    values = HV // H * V
    return [
        _Fused(
            "in_proj_qkvz.weight",
            H,
            {
                "q_proj.weight": K,
                "k_proj.weight": K,
                "v_proj.weight": values,
                "g_proj.weight": values,
            },
        ),
        _Fused("in_proj_ba.weight", H, {"b_proj.weight": HV // H, "a_proj.weight": HV // H}),
        _Fused(
            "conv1d.weight",
            1,
            {"q_conv1d.weight": H * K, "k_conv1d.weight": H * K, "v_conv1d.weight": HV * V},
        ),
        _Fused("A_log", 1, {"A_log": HV}),
        _Fused("dt_bias", 1, {"dt_bias": HV}),
        _Fused("norm.weight", 1, {"o_norm.weight": V}),
        _Fused("out_proj.weight", 1, {"o_proj.weight": o.hidden_size}),
    ]


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.linear_attn."


def _layer_of(name: str) -> int | None:
    """The layer of the mixer that a tensor belongs to, or `None` if it belongs to no mixer."""
    found = re.match(r"model\.layers\.(\d{1,9})\.linear_attn\.", name)
    return None if found is None else int(found[1])


def load_qwen3_next(
    directory: str | PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    implementation: Choice = None,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
) -> dict[int, DeltaNet]:
    """The Gated DeltaNet mixers of a Qwen3-Next checkpoint, by number of their layer.

    Other tensors of the checkpoint are not read.

    Args:
        directory: Directory of config.json and the safetensors.
        layers: Layer numbers; by default all that have such a mixer.
        implementation: Implementation of every mixer; see `linear_attention`.
        dtype: Dtype of computation; by default what input and parameters promote to.
        param_dtype: Dtype of parameters; by default the narrowest that is exact.
            `A_log` and `dt_bias` are float32 in any case.

    Raises:
        FileNotFoundError: If there is no config.json, or no safetensors.
        ValueError: If an option is not supported, or a tensor of these mixers is unknown,
            missing or of another shape; the message lists all of them.

    Example:
        >>> mixer = DeltaNet(8, 2, gate="scalar", use_output_gate=True, rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_qwen3_next({0: mixer, 2: mixer}, f"{folder}/mine")
        ...     list(load_qwen3_next(f"{folder}/mine"))
        [0, 2]
    """
    path = Path(directory)
    options, chosen, problems = _read_options(read_config(path), layers)
    numbers = set(chosen)
    tensors, wrong = read_tensors(path, lambda name: _layer_of(name) in numbers)
    problems += wrong + (scarce := enough_tensors(len(numbers), tensors))
    if options is None or scarce:
        refuse(path, problems)
        raise AssertionError("options that are not known are a problem")
    kept = exact_dtype(tensors) if param_dtype is None else check_dtype("param_dtype", param_dtype)
    kept, rounded = check_x64(kept)
    problems += rounded

    def make() -> DeltaNet:
        return DeltaNet(
            **options,
            implementation=implementation,
            dtype=dtype,
            param_dtype=kept,
            rngs=nnx.Rngs(0),
        )

    mixers = {i: abstract(make) for i in chosen}
    for i, mixer in mixers.items():
        wanted = _arrays(mixer, _prefix(i), None)
        problems += compare(wanted, {n: t for n, t in tensors.items() if n.startswith(_prefix(i))})
    refuse(path, problems)
    for i, mixer in mixers.items():
        _fill(mixer, _prefix(i), tensors)
    return mixers


def _read_options(
    data: Mapping[str, Any], layers: Sequence[int] | None
) -> tuple[dict[str, Any] | None, list[int], list[str]]:
    """Options of the mixers, the layers that were asked for, and what is not supported."""
    if problems := wrong_type(data, ("qwen3_next",)):
        return None, [], problems
    problems = [f"config.json has no `{name}`" for name in NEEDED if name not in data]
    problems += check_fields(data, SIZES, ("rms_norm_eps",))
    kinds = data.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        problems.append(f"`layer_types` must be a list; got {shown(kinds)}")
    count: Any = data.get("num_hidden_layers")
    if isinstance(count, int) and count > MOST_LAYERS:
        problems.append(f"`num_hidden_layers` must be at most {MOST_LAYERS}; got {count}")
    if problems:
        return None, [], problems
    if data["hidden_act"] != "silu":
        problems.append(f"`hidden_act` is {shown(data['hidden_act'])}, supported: 'silu'")
    if kinds:
        linear = [i for i, kind in enumerate(kinds) if kind == LINEAR]
    else:
        linear = [i for i in range(count) if (i + 1) % data.get("full_attention_interval", 4)]
    chosen = linear if layers is None else [checks.whole("layers", i, least=0) for i in layers]
    if missing := [i for i in chosen if i not in linear]:
        problems.append(f"`layers` must be among {linear}; got {missing}")
    key, value = data["linear_key_head_dim"], data["linear_value_head_dim"]
    options = {
        "hidden_size": data["hidden_size"],
        "num_heads": data["linear_num_key_heads"],
        "num_v_heads": data["linear_num_value_heads"],
        "head_dim": key,
        "expand_v": value / key,
        "conv_size": data["linear_conv_kernel_dim"],
        "norm_eps": data["rms_norm_eps"],
        **FIXED,
    }
    try:
        LayerOptions(**options)
    except ValueError as error:
        return None, chosen, [*problems, str(error)]
    return options, chosen, problems


def _arrays(mixer: DeltaNet, prefix: str, dtype: jnp.dtype | None) -> dict[str, LazyArray]:
    """The tensors of a mixer under their names; of an abstract mixer, their shapes."""
    parts = lazy_arrays(mixer, list(mixer_entries(mixer.options)), dtype)
    arrays = {}
    for fused in _fused(mixer.options):
        held = {name: parts[name] for name in fused.rows}
        first = held[next(iter(held))]
        shape = (sum(x.shape[0] for x in held.values()), *first.shape[1:])
        arrays[prefix + fused.name] = LazyArray(shape, first.dtype, partial(_join, fused, held))
    return arrays


def _join(fused: _Fused, held: Mapping[str, LazyArray]) -> np.ndarray:
    return fused.join({name: x.make() for name, x in held.items()})


def _fill(mixer: DeltaNet, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    parts: dict[str, np.ndarray] = {}
    for fused in _fused(mixer.options):
        parts |= fused.split(tensors[prefix + fused.name].read())
    fill(mixer, list(mixer_entries(mixer.options)), parts.__getitem__)


def save_qwen3_next(
    mixers: Mapping[int, DeltaNet],
    directory: str | PathLike[str],
    *,
    dtype: DTypeLike | None = None,
) -> None:
    """Write mixers under the names they have in Qwen3-Next; the inverse of `load_qwen3_next`.

    Config.json says what the mixers say, and nothing of the rest of a model.

    Args:
        mixers: By number of their layer; all of the same options.
        directory: A new directory; it appears under its name only when it is complete.
        dtype: Dtype of every tensor; by default its own, float32 for `A_log` and `dt_bias`.

    Raises:
        FileExistsError: If there is something of that name.
        ValueError: If there is no mixer, or one has options that Qwen3-Next does not have; the
            message lists all of them.

    Example:
        >>> mixer = DeltaNet(8, 2, gate="scalar", use_output_gate=True, rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_qwen3_next({0: mixer}, f"{folder}/mine", dtype="bfloat16")
        ...     sorted(os.listdir(f"{folder}/mine"))
        ['config.json', 'model.safetensors']
    """
    if not mixers:
        raise ValueError("`mixers` must hold at least one; got none")
    refuse("`mixers`", [p for i, mixer in mixers.items() for p in _unsayable(i, mixer, mixers)])
    as_dtype = None if dtype is None else check_dtype("dtype", dtype)
    arrays: dict[str, LazyArray] = {}
    for i in sorted(mixers):
        arrays |= _arrays(mixers[i], _prefix(i), as_dtype)
    first = next(iter(mixers.values()))
    o, kept = first.options, as_dtype or first.param_dtype
    config = {
        "model_type": "qwen3_next",
        "torch_dtype": kept.name,
        "hidden_size": o.hidden_size,
        "hidden_act": "silu",
        "rms_norm_eps": o.norm_eps,
        "num_hidden_layers": max(mixers) + 1,
        "layer_types": [LINEAR if i in mixers else FULL for i in range(max(mixers) + 1)],
        "linear_num_key_heads": o.num_heads,
        "linear_num_value_heads": o.value_heads,
        "linear_key_head_dim": o.key_dim,
        "linear_value_head_dim": o.value_dim,
        "linear_conv_kernel_dim": o.conv_size,
    }
    write_checkpoint(Path(directory), config, arrays)


def _unsayable(layer: int, mixer: DeltaNet, mixers: Mapping[int, DeltaNet]) -> list[str]:
    """Options that Qwen3-Next does not have, and differences between layers."""
    o, first = mixer.options, next(iter(mixers.values())).options
    differing = [
        f"layer {layer}: `{f.name}` is {getattr(o, f.name)!r}, another layer's "
        f"{getattr(first, f.name)!r}"
        for f in fields(o)
        if f.name != "chunk_size" and getattr(o, f.name) != getattr(first, f.name)
    ]
    return (
        differing
        + [
            f"layer {layer}: `{name}` is {getattr(o, name)!r}, Qwen3-Next has {wanted!r}"
            for name, wanted in FIXED.items()
            if getattr(o, name) != wanted
        ]
        + [f"layer {layer}: `conv_size` is None, Qwen3-Next has convolutions"]
        * (o.conv_size is None)
    )
