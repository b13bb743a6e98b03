"""Parameters of every layer: named axes, no biases, one policy of dtypes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from jax.typing import DTypeLike

__all__ = ["EMBED", "HEADS", "MLP", "VOCAB", "parameter", "projection"]

# Logical names of the axes that parameters can be sharded over.
EMBED, HEADS, MLP, VOCAB = "embed", "heads", "mlp", "vocab"

LinearPrecision = (
    str | jax.lax.Precision | tuple[str, str] | tuple[jax.lax.Precision, jax.lax.Precision] | None
)
Names = tuple[str | None, ...]


@dataclass(frozen=True)
class _DefaultRules:
    """Rules of a mesh for which none are given: no axis is sharded that the mesh does not name.

    Flax takes a name without a rule for an axis of the mesh, and `nnx.eval_shape` then fails
    inside `jax.set_mesh`. Rules that are given hold alone, so this is empty beside them.
    """

    def __bool__(self) -> bool:
        given = spmd.get_logical_axis_rules()
        return not given and not jax.sharding.get_abstract_mesh().empty

    def __iter__(self) -> Iterator[tuple[str, str | None]]:
        axes = jax.sharding.get_abstract_mesh().axis_names
        for name in (EMBED, HEADS, MLP, VOCAB):
            yield name, name if name in axes else None


def _metadata(names: Names) -> dict[str, Any]:
    # Sharding eagerly would make every construction without a mesh an error.
    return {"out_sharding": names, "eager_sharding": False, "sharding_rules": _DefaultRules()}


def parameter(value: jax.Array, names: Names) -> nnx.Param[jax.Array]:
    """A parameter whose axes carry logical names; `nnx.logical_axis_rules` maps them to a mesh."""
    return nnx.Param(value, **_metadata(names))


def projection(
    in_features: int,
    out_features: int,
    names: Names,
    *,
    dtype: DTypeLike | None,
    param_dtype: DTypeLike,
    precision: LinearPrecision,
    kernel_init: nnx.Initializer,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A linear map without a bias, as every map of these layers is."""
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=False,
        dtype=dtype,
        param_dtype=jnp.dtype(param_dtype),
        precision=precision,
        kernel_init=kernel_init,
        kernel_metadata=_metadata(names),
        rngs=rngs,
    )
