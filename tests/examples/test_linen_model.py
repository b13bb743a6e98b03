"""The three layers as Linen modules: parameters, scan, remat, partitioning, mutable cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge
from jax.sharding import AxisType, PartitionSpec

from deltanet_jax import AssociativeDeltaNet, ChunkwiseDeltaNet, RecurrentDeltaNet
from deltanet_jax.layers.linen import logical_axes
from examples.linen_model import Stack
from tests.tolerances import TOLERANCES, assert_close

MODULES = [RecurrentDeltaNet, AssociativeDeltaNet, ChunkwiseDeltaNet]
X = jax.random.normal(jax.random.key(0), (2, 6, 8))
SPEC = {"q_proj": ("embed", "heads"), "o_proj": ("heads", "embed")}


@pytest.mark.parametrize("module", MODULES)
def test_parameters_outputs_and_gradients_are_those_of_the_layer(module):
    linen = bridge.to_linen(module, 8, 2, gate="scalar")
    variables = linen.init(jax.random.key(1), X)
    assert set(variables) == {"params"}
    plain = nn.unbox(variables["params"])
    layer = module(8, 2, gate="scalar", rngs=nnx.Rngs(0))
    state = nnx.state(layer)
    nnx.replace_by_pure_dict(state, plain)
    nnx.update(layer, state)
    np.testing.assert_allclose(linen.apply(variables, X), layer(X), atol=1e-6)
    got = jax.grad(lambda p: jnp.sum(jnp.sin(linen.apply({"params": p}, X))))(plain)
    want = nnx.grad(lambda m: jnp.sum(jnp.sin(m(X))))(layer)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, nnx.to_pure_dict(want)
    )


def test_axes_keep_their_logical_names():
    linen = bridge.to_linen(ChunkwiseDeltaNet, 8, 2, metadata_fn=logical_axes)
    abstract = jax.eval_shape(linen.init, jax.random.key(0), X)
    specs = nn.get_partition_spec(abstract)["params"]
    for name, names in SPEC.items():
        assert specs[name]["kernel"] == PartitionSpec(*names)
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 2), ("data", "model"), types, devices=jax.devices()[:2])
    rules = (("embed", None), ("heads", "model"))
    placed = nn.logical_to_mesh_sharding(specs, mesh, rules)
    assert placed["q_proj"]["kernel"].spec == PartitionSpec(None, "model")


@pytest.mark.parametrize("module", MODULES)
def test_a_scan_over_rematerialised_blocks_equals_a_loop(module):
    stack = Stack(layer=module)
    variables = stack.init(jax.random.key(1), X)
    specs = nn.get_partition_spec(variables)["params"]["blocks"]["mixer"]
    for name, names in SPEC.items():
        assert specs[name]["kernel"] == PartitionSpec("layers", *names)
    plain = nn.unbox(variables["params"])["blocks"]
    assert plain["mixer"]["q_proj"]["kernel"].shape == (3, 8, 8)
    assert not np.allclose(*plain["mixer"]["q_proj"]["kernel"][:2])

    def loop(p, x):
        mixer = bridge.to_linen(module, 8, 2)
        for i in range(3):
            one = jax.tree.map(lambda a, i=i: a[i], p)
            y = nn.RMSNorm().apply({"params": one["norm"]}, x)
            x = x + mixer.apply({"params": one["mixer"]}, y)
        return x

    def scanned(p, x):
        return stack.apply({"params": {"blocks": p}}, x)

    def grads(f):
        def loss(p):
            y = f(p, X)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, has_aux=True))(plain)

    (got, y), (wanted, wanted_y) = grads(scanned), grads(loop)
    tolerance = TOLERANCES["float32"]
    assert_close("y", y, wanted_y, tolerance.forward)
    jax.tree.map(lambda a, b: assert_close("gradient", a, b, tolerance.gradient), got, wanted)


@pytest.mark.parametrize("module", MODULES)
def test_a_mutable_cache_decodes_what_the_whole_sequence_gives(module):
    variables = Stack(layer=module).init(jax.random.key(1), X)
    whole = Stack(layer=module).apply(variables, X)
    decoder = Stack(decode=True, layer=module)
    cache = decoder.init(jax.random.key(2), X[:, :1])["cache"]
    assert all(np.all(np.asarray(part) == 0) for part in jax.tree.leaves(cache))
    pieces = []
    extend = jax.jit(
        lambda cache, x: decoder.apply(
            {"params": variables["params"], "cache": cache}, x, mutable=["cache"]
        )
    )
    for piece in (X[:, :4], X[:, 4:5], X[:, 5:]):
        y, updated = extend(cache, piece)
        cache = updated["cache"]
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=2e-5)
    with pytest.raises(Exception, match="(?i)immutable|mutable"):
        decoder.apply({"params": variables["params"], "cache": cache}, X[:, :1])
