"""Language models of flash-linear-attention: `DeltaNetForCausalLM`, `GatedDeltaNetForCausalLM`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from deltanet_jax.convert.files import (
    SHARD_BYTES,
    Tensor,
    compare,
    enough_tensors,
    matches,
    promoted_dtype,
    read_config,
    read_tensors,
    refuse,
    without,
    write_checkpoint,
)
from deltanet_jax.convert.fla_config import config_from_fla, config_to_fla
from deltanet_jax.convert.names import abstract, fill, lazy_arrays, model_entries
from deltanet_jax.layers.checks import check_dtype
from deltanet_jax.models.config import DeltaNetConfig
from deltanet_jax.models.delta_net_lm import DeltaNetLM
from deltanet_jax.ops.api import Choice

__all__ = ["check_x64", "exact_dtype", "load_fla", "save_fla"]

HEAD, EMBEDDINGS = "lm_head.weight", "model.embeddings.weight"


def load_fla(
    directory: str | PathLike[str],
    *,
    implementation: Choice = None,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    ignore: Sequence[str] = (),
) -> DeltaNetLM:
    """A language model from a directory of config.json and safetensors, one file or shards.

    Model types `delta_net` and `gated_deltanet`, as flash-linear-attention 0.6.0 writes them,
    and the uploads of 2024 whose `mlp.gate_proj` holds the gate above the up projection.

    Args:
        directory: Directory of the checkpoint.
        implementation: Implementation of every mixer; see `linear_attention`.
        dtype: Dtype of computation; by default that of the parameters.
        param_dtype: Dtype of parameters; by default the narrowest that is exact.
            `A_log` and `dt_bias` are float32 in any case.
        ignore: Shell patterns of config keys and tensor names to read as if they were absent.

    Raises:
        FileNotFoundError: If there is no config.json, or no safetensors.
        ValueError: If an option is not supported, or a tensor is unknown, missing or of another
            shape; the message lists all of them.

    Example:
        >>> config = DeltaNetConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2)
        >>> model = DeltaNetLM(config, rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_fla(model, f"{folder}/mine")
        ...     again = load_fla(f"{folder}/mine", implementation="chunkwise")
        >>> bool(jnp.all(again.embedding[...] == model.embedding[...]))
        True
    """
    path, patterns = Path(directory), tuple(ignore)
    data = without(read_config(path), patterns)
    tensors, problems = read_tensors(path, lambda name: not matches(name, patterns))
    kept = exact_dtype(tensors) if param_dtype is None else check_dtype("param_dtype", param_dtype)
    kept, rounded = check_x64(kept)
    problems += rounded
    computed = None if dtype is None else check_dtype("dtype", dtype).name
    config, options = config_from_fla(data, kept.name, computed)
    problems = options + problems
    if config is not None:
        problems += (scarce := enough_tensors(config.num_layers, tensors))
    if config is None or scarce:
        refuse(path, problems)
        raise AssertionError("a config that is not known is a problem")
    tensors = _split_fused_gates(tensors, config)
    problems += _drop_tied_head(tensors, config)
    model = abstract(lambda: DeltaNetLM(config, implementation=implementation, rngs=nnx.Rngs(0)))
    entries = list(model_entries(config))
    refuse(path, problems + compare(lazy_arrays(model, entries, None), tensors))
    fill(model, entries, lambda name: tensors[name].read())
    return model


def exact_dtype(tensors: Mapping[str, Tensor]) -> jnp.dtype:
    """The narrowest dtype that holds every tensor exactly but those that are float32 here."""
    narrow = {n: t for n, t in tensors.items() if not n.endswith(("A_log", "dt_bias"))}
    return promoted_dtype(narrow)


def check_x64(dtype: jnp.dtype) -> tuple[jnp.dtype, list[str]]:
    """The dtype that JAX has now for this one; rounding float64 is a problem to speak of."""
    kept = jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))
    wrong = [f"tensors are {dtype}: enable jax_enable_x64, or choose a `param_dtype`"]
    return kept, wrong if kept != dtype else []


def _split_fused_gates(tensors: dict[str, Tensor], config: DeltaNetConfig) -> dict[str, Tensor]:
    """The older layout, gate above up in one tensor, as the two that it holds."""
    split, width = dict(tensors), config.mlp_width
    for i in range(config.num_layers):
        gate, up = (f"model.layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        fused = tensors.get(gate)
        if up not in tensors and fused is not None and fused.shape[:1] == (2 * width,):
            split[gate], split[up] = fused.part(slice(0, width)), fused.part(slice(width, None))
    return split


def _drop_tied_head(tensors: dict[str, Tensor], config: DeltaNetConfig) -> list[str]:
    """Drop the second name of tied embeddings, which some writers store; report a difference."""
    if not config.tie_embeddings or HEAD not in tensors or EMBEDDINGS not in tensors:
        return []
    head = tensors.pop(HEAD)
    same = np.array_equal(head.read(), tensors[EMBEDDINGS].read())
    return [] if same else [f"{HEAD} differs from {EMBEDDINGS}, and they are said to be tied"]


def save_fla(
    model: DeltaNetLM,
    directory: str | PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model as a directory that flash-linear-attention reads; the inverse of `load_fla`.

    The directory appears under its name only when it is complete. `chunk_size`, and a `dtype`
    of computation that is not that of the parameters, have no place in it.

    Args:
        model: The model.
        directory: A new directory.
        dtype: Dtype of every tensor; by default its own, float32 for `A_log` and `dt_bias`.
        max_shard_bytes: Largest file, unless one tensor is larger.
        extra: Further keys of config.json, such as `eos_token_id`; none of the model's own.

    Raises:
        FileExistsError: If there is something of that name.
        ValueError: If the model has options that flash-linear-attention does not have; the
            message lists all of them.

    Example:
        >>> config = DeltaNetConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_fla(DeltaNetLM(config, rngs=nnx.Rngs(0)), f"{folder}/mine")
        ...     sorted(os.listdir(f"{folder}/mine"))
        ['config.json', 'model.safetensors']
    """
    path = Path(directory)
    data, problems = config_to_fla(model.config)
    problems += [f"`extra` sets `{n}`, which is the model's" for n in extra or {} if n in data]
    refuse("the model", problems)
    as_dtype = None if dtype is None else check_dtype("dtype", dtype)
    if as_dtype is not None:
        data["torch_dtype"] = as_dtype.name
    arrays = lazy_arrays(model, list(model_entries(model.config)), as_dtype)
    write_checkpoint(path, data | dict(extra or {}), arrays, max_shard_bytes)
