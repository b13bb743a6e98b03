"""Names and layouts: which tensor of flash-linear-attention is which parameter here."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from deltanet_jax.convert.files import LazyArray
from deltanet_jax.layers.options import LayerOptions
from deltanet_jax.models.config import DeltaNetConfig

__all__ = ["Entry", "abstract", "fill", "lazy_arrays", "mixer_entries", "model_entries"]

Made = TypeVar("Made", bound=nnx.Module)
Path = tuple[str | int, ...]
Relayout = Callable[[np.ndarray], np.ndarray]


class Layout(NamedTuple):
    """A linear map there is `[out, in]`, a convolution `[channels, 1, taps]`."""

    theirs: Relayout
    ours: Relayout

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.theirs(np.broadcast_to(np.float32(0), shape)).shape


AS_IS = Layout(lambda x: x, lambda x: x)
TRANSPOSED = Layout(lambda x: x.T, lambda x: x.T)
TAPS = Layout(lambda x: x.T[:, None], lambda x: x[:, 0].T)


class Entry(NamedTuple):
    """One tensor: its name there, its place in the tree of parameters here, its layout."""

    name: str
    path: Path
    layout: Layout

    def inside(self, name: str, path: Path) -> "Entry":
        return Entry(f"{name}.{self.name}", (*path, *self.path), self.layout)


def _linear(name: str) -> Entry:
    return Entry(f"{name}.weight", (name, "kernel"), TRANSPOSED)


def _norm(name: str, path: str) -> Entry:
    return Entry(f"{name}.weight", (path, "scale"), AS_IS)


def mixer_entries(options: LayerOptions) -> Iterator[Entry]:
    """List the tensors of one mixer."""
    for name in ("q", "k", "v", "o"):
        yield _linear(f"{name}_proj")
    if options.conv_size is not None:
        for name in ("q", "k", "v"):
            yield Entry(f"{name}_conv1d.weight", (f"{name}_conv", "kernel"), TAPS)
    if options.use_beta:
        yield _linear("b_proj")
    if options.gate == "scalar":
        yield _linear("a_proj")
        for name in ("A_log", "dt_bias"):
            yield Entry(name, ("decay", name), AS_IS)
    if options.use_output_gate:
        yield _linear("g_proj")
    yield _norm("o_norm", "o_norm")


def model_entries(config: DeltaNetConfig) -> Iterator[Entry]:
    """List the tensors of a whole language model."""
    yield Entry("model.embeddings.weight", ("embedding",), AS_IS)
    for i in range(config.num_layers):
        there, here = f"model.layers.{i}", ("blocks", i)
        yield _norm("attn_norm", "mixer_norm").inside(there, here)
        for entry in mixer_entries(LayerOptions(**config.layer_options())):
            yield entry.inside(f"{there}.attn", (*here, "mixer"))
        yield _norm("mlp_norm", "mlp_norm").inside(there, here)
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield _linear(name).inside(f"{there}.mlp", (*here, "mlp"))
    yield _norm("norm", "norm").inside("model", ())
    if not config.tie_embeddings:
        yield Entry("lm_head.weight", ("head", "kernel"), TRANSPOSED)


def _parameters(module: nnx.Module) -> dict[Path, Any]:
    return _flat(nnx.state(module))


def _flat(state: nnx.State[Any, Any]) -> dict[Path, Any]:
    flat: dict[Path, Any] = traverse_util.flatten_dict(  # type: ignore[no-untyped-call]
        nnx.to_pure_dict(state)
    )
    return flat


def abstract(make: Callable[[], Made]) -> Made:
    """Make a module without its arrays.

    Raises:
        ValueError: If it would have arrays that no machine can hold.
    """
    try:
        made: Made = nnx.eval_shape(make)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"config.json asks for arrays that are too large: {error}") from error
    return made


def fill(module: nnx.Module, entries: list[Entry], read: Callable[[str], np.ndarray]) -> None:
    """Give an abstract module its parameters, each in the dtype that it has there.

    Inside `jax.set_mesh` they go to the mesh, sharded by the logical axis rules.
    """
    state, parameters, mesh = nnx.state(module), _parameters(module), jax.sharding.get_mesh()
    places = {} if mesh.empty else _flat(nnx.get_named_sharding(state, mesh))
    for entry in entries:
        array = entry.layout.ours(read(entry.name)).astype(parameters[entry.path].dtype)
        parameters[entry.path] = _placed(entry.name, array, places.get(entry.path))
    nested = traverse_util.unflatten_dict(parameters)  # type: ignore[no-untyped-call]
    nnx.replace_by_pure_dict(state, nested)
    nnx.update(module, state)


def _placed(name: str, array: np.ndarray, place: jax.sharding.Sharding | None) -> jax.Array:
    if place is None:
        return jnp.asarray(array)
    try:
        placed: jax.Array = jax.device_put(array, place)
    except ValueError as error:
        raise ValueError(f"{name} cannot be sharded: {error}") from error
    return placed


def lazy_arrays(
    module: nnx.Module, entries: list[Entry], dtype: jnp.dtype | None
) -> dict[str, LazyArray]:
    """The parameters under their names there, by default each in its own dtype.

    Of an abstract module it gives the shapes.
    """
    parameters = _parameters(module)
    arrays = {}
    for entry in entries:
        x = parameters[entry.path]
        kept = x.dtype if dtype is None else dtype
        arrays[entry.name] = LazyArray(
            entry.layout.their_shape(x.shape),
            jnp.dtype(kept),
            lambda x=x, entry=entry, kept=kept: entry.layout.theirs(  # type: ignore[misc]
                np.asarray(jax.device_get(x)).astype(kept)
            ),
        )
    return arrays
