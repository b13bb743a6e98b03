"""Training over a mesh with axes for data, parameters (FSDP), heads and context."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from deltanet_jax.core import checks
from deltanet_jax.layers.parameters import EMBED, HEADS, MLP, VOCAB
from deltanet_jax.models.config import DeltaNetConfig

__all__ = ["AXES", "RULES", "check_mesh", "make_mesh", "make_sharded", "put_batch"]

AXES = ("data", "fsdp", "heads", "context")
# Which mesh axis shards which named axis of the parameters.
RULES = ((EMBED, "fsdp"), (HEADS, "heads"), (MLP, "heads"), (VOCAB, "heads"))
# Rows of a batch go to every device that does not share their heads or their tokens.
BATCH = (("data", "fsdp"), "context")

Modules = TypeVar("Modules")


def make_mesh(
    *, data: int = 1, fsdp: int = 1, heads: int = 1, context: int = 1, explicit: bool = False
) -> Mesh:
    """A mesh over the first devices of all processes.

    Args:
        data: Copies of the parameters, each with its own rows of the batch.
        fsdp: Parts of every parameter; the rows of the batch are split as well.
        heads: Parts of heads, of the MLP's width and of the vocabulary.
        context: Parts of every sequence; models need `context_axis="context"`.
        explicit: Whether rows and tokens are sharded in the types of arrays
            (`AxisType.Explicit`: a silent gather of them is then an error) or by the compiler.
            The axes of parameters are the compiler's in any case.

    Raises:
        ValueError: If an axis is not a positive integer, or there are too few devices.

    Example:
        >>> make_mesh(data=jax.device_count()).shape["data"] == jax.device_count()
        True
    """
    sizes = {"data": data, "fsdp": fsdp, "heads": heads, "context": context}
    for name, size in sizes.items():
        checks.whole(name, size, least=1)
    wanted = math.prod(sizes.values())
    if wanted > jax.device_count():
        raise ValueError(f"the mesh {sizes} needs {wanted} devices; there are {jax.device_count()}")
    shown = AxisType.Explicit if explicit else AxisType.Auto
    kinds = tuple(shown if name in ("data", "context") else AxisType.Auto for name in AXES)
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=kinds, devices=jax.devices()[:wanted]
    )


def check_mesh(config: DeltaNetConfig, mesh: Mesh, *, batch: int, tokens: int) -> None:
    """Raise `ValueError` unless every axis of the mesh divides what it shards.

    Example:
        >>> config = DeltaNetConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2)
        >>> check_mesh(config, make_mesh(), batch=4, tokens=32)  # all divide: no error
    """
    size = dict(mesh.shape)
    sharded = [
        ("heads", "num_heads", config.num_heads),
        ("heads", "num_v_heads", config.num_v_heads or config.num_heads),
        ("heads", "mlp_size", config.mlp_width),
        ("heads", "vocab_size", config.vocab_size),
        ("fsdp", "hidden_size", config.hidden_size),
        ("context", "the number of tokens", tokens),
    ]
    for axis, name, number in sharded:
        if number % size[axis]:
            raise ValueError(
                f"the mesh axis `{axis}` of {size[axis]} must divide {name}; got {number}"
            )
    rows = size["data"] * size["fsdp"]
    if batch % rows:
        raise ValueError(
            f"the mesh axes `data` and `fsdp` of {rows} together must divide the batch; got {batch}"
        )


def make_sharded(create: Callable[[], Modules], mesh: Mesh) -> Modules:
    """Modules whose variables are made where they belong; no device ever holds all of them.

    Args:
        create: Makes a module, or a tuple of modules such as a model and its optimiser.
        mesh: The mesh of `make_mesh`.

    Example:
        >>> config = DeltaNetConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2)
        >>> model = make_sharded(lambda: DeltaNetLM(config, rngs=nnx.Rngs(0)), make_mesh())
        >>> model.embedding.sharding.mesh.axis_names
        ('data', 'fsdp', 'heads', 'context')
    """

    @nnx.jit
    def build() -> Modules:
        modules = create()
        graph, state = nnx.split(modules)
        constrain: Callable[..., Any] = jax.lax.with_sharding_constraint
        placed = constrain(state, nnx.get_named_sharding(state, mesh))
        merged: Modules = nnx.merge(graph, placed)
        return merged

    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        modules: Modules = build()
    return modules


def put_batch(batch: np.ndarray, mesh: Mesh) -> Int[Array, "B T"]:
    """A batch that every process holds, as one array over the mesh.

    Example:
        >>> batch = put_batch(np.zeros((4, 32), np.int32), make_mesh())
        >>> batch.shape, batch.sharding.mesh.axis_names
        ((4, 32), ('data', 'fsdp', 'heads', 'context'))
    """
    spec: Callable[..., PartitionSpec] = PartitionSpec
    sharding = NamedSharding(mesh, spec(*BATCH))

    def part(index: Any) -> np.ndarray:
        return np.asarray(batch[index])

    return jax.make_array_from_callback(batch.shape, sharding, part)
