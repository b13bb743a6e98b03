"""A layer whose `context_axis` is set gives what it gives on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deltanet_jax import DeltaNet
from tests.tolerances import TOLERANCES, assert_close

B, T, HIDDEN = 2, 32, 8


def _layer(context_axis: str | None) -> DeltaNet:
    return DeltaNet(
        HIDDEN,
        2,
        gate="scalar",
        implementation="recurrent",
        context_axis=context_axis,
        rngs=nnx.Rngs(0),
    )


def _mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "context"), axis_types=(kind, kind))


def _x() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (B, T, HIDDEN))


def _segment_ids() -> np.ndarray:
    """Boundaries at a border of shards, and within the convolutions' reach of one."""
    starts = np.zeros((B, T), np.int32)
    starts[0, [8, 17, 23]] = 1
    starts[1, [2, 15, 24, 26]] = 1
    return np.cumsum(starts, axis=1).astype(np.int32)


@nnx.jit
def _value_and_grads(layer: DeltaNet, x: jax.Array, segment_ids: jax.Array) -> tuple:
    def loss(layer: DeltaNet, x: jax.Array) -> tuple:
        y = layer(x, segment_ids=segment_ids)
        return jnp.sum(jnp.sin(3 * y)), y

    (_, y), grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return y, nnx.to_pure_dict(nnx.state(grads[0])), grads[1]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_context_axis_changes_nothing(kind: AxisType) -> None:
    y, grads, dx = _value_and_grads(_layer(None), _x(), _segment_ids())
    mesh = _mesh(kind)
    layer = _layer("context")
    with jax.set_mesh(mesh):
        x, ids = (
            jax.device_put(a, NamedSharding(mesh, P("data", "context")))
            for a in (_x(), _segment_ids())
        )
        got = _value_and_grads(layer, x, ids)
    forward, gradient = TOLERANCES["float32"]
    assert_close("y", got[0], y, forward)
    assert_close("dx", got[2], dx, gradient)
    jax.tree.map(lambda a, b: assert_close("parameters", a, b, gradient), got[1], grads)
    assert got[0].sharding.spec[:2] == ("data", "context")


def test_a_cache_goes_through_a_sharded_prefill_and_decoding() -> None:
    x, alone, layer = _x(), _layer(None), _layer("context")
    extend = nnx.jit(lambda layer, x, cache: layer.extend(x, cache))
    cache = alone.init_cache(B)
    y0, cache = extend(alone, x[:, :16], cache)
    y1, cache = extend(alone, x[:, 16:], cache)
    y2, cache = extend(alone, x[:, :1], cache)
    with jax.set_mesh(_mesh()):
        sharded = layer.init_cache(B)
        z0, sharded = extend(layer, x[:, :16], sharded)
        z1, sharded = extend(layer, x[:, 16:], sharded)
        z2, sharded = extend(layer, x[:, :1], sharded)
    forward = TOLERANCES["float32"].forward
    for name, a, b in (("prefill", z0, y0), ("more", z1, y1), ("token", z2, y2)):
        assert_close(name, a, b, forward)
    jax.tree.map(lambda a, b: assert_close("cache", a, b, forward), sharded, cache)


def test_wrong_meshes_and_masks_are_named() -> None:
    layer, x = _layer("context"), _x()
    with pytest.raises(ValueError, match="`context_axis` must be an axis of the mesh"):
        layer(x)
    with jax.set_mesh(_mesh()):
        with pytest.raises(ValueError, match="4 devices, which must divide.*got 30"):
            layer(x[:, :30])
        with pytest.raises(ValueError, match="`mask` does not go with `context_axis`"):
            layer(x, mask=jnp.ones((B, T), bool))
        with pytest.raises(ValueError, match="at least the 3 tokens"):
            layer(x[:, :8])
