"""Running a layer: in the caller's trace, as one compiled program, or along a context axis."""

from functools import partial
from typing import Any, Protocol

import jax
from flax import nnx

from deltanet_jax import parallel
from deltanet_jax.core.checks import check_whole_time
from deltanet_jax.layers.cache import DeltaNetCache
from deltanet_jax.layers.convolution import ShortConvolution
from deltanet_jax.layers.gates import DecayParameters
from deltanet_jax.layers.norms import RMSNorm
from deltanet_jax.ops.dispatch import is_on_default_platform

__all__ = ["mix_along_context", "mix_here"]

PARTS = (nnx.Linear, ShortConvolution, DecayParameters, RMSNorm)

Result = tuple[jax.Array, DeltaNetCache]


class Mixer(Protocol):
    """A layer, as this module needs it."""

    def _mix(
        self,
        x: jax.Array,
        cache: DeltaNetCache | None,
        segment_ids: jax.Array | None,
        mask: jax.Array | None,
        axis: str | None = None,
    ) -> Result: ...


def mix_here(
    layer: Mixer,
    x: jax.Array,
    cache: DeltaNetCache | None,
    segment_ids: jax.Array | None,
    mask: jax.Array | None,
) -> Result:
    """Mix on the caller's devices; where nothing is traced, as one compiled program.

    Compiling every operation by itself takes several times as long, and so does running them.
    """
    check_whole_time("x", x)
    arrays = (x, cache, segment_ids, mask)
    if not (is_on_default_platform(x) and _has_known_parts(layer)):
        return layer._mix(*arrays)
    graph, parameters = nnx.split(layer)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((parameters, arrays))):
        return layer._mix(*arrays)
    result: Result = _compiled(graph, parameters, *arrays)
    return result


def _has_known_parts(layer: Mixer) -> bool:
    """Whether every part is one of ours, which nothing but parameters goes in or out of."""
    parts = [part for part in vars(layer).values() if isinstance(part, nnx.Module)]
    return all(type(part) in PARTS for part in parts)


@partial(jax.jit, static_argnums=0)
def _compiled(graph: nnx.GraphDef[Any], parameters: Any, *arrays: Any) -> Result:
    result: Result = nnx.merge(graph, parameters)._mix(*arrays)
    return result


def mix_along_context(
    layer: Mixer,
    axis: str,
    x: jax.Array,
    cache: DeltaNetCache | None,
    segment_ids: jax.Array | None,
) -> Result:
    """Mix with time sharded over a mesh axis."""
    # Parameters are arguments: arrays captured by a `shard_map` body keep their outer
    # sharding type.
    graph, parameters = nnx.split(layer)

    def mix(
        x: jax.Array, segment_ids: jax.Array | None, shared: tuple[Any, DeltaNetCache | None]
    ) -> Result:
        parameters, cache = shared
        result: Result = nnx.merge(graph, parameters)._mix(x, cache, segment_ids, None, axis)
        return result

    result: Result = parallel.along_context(mix, axis, x, segment_ids, shared=(parameters, cache))
    return result
