"""The layers under Flax's and JAX's transforms, in every dtype, on meshes, and their parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from deltanet_jax import AssociativeDeltaNet, ChunkwiseDeltaNet, DeltaNet, RecurrentDeltaNet
from tests.tolerances import TOLERANCES, assert_close

MODULES = [RecurrentDeltaNet, AssociativeDeltaNet, ChunkwiseDeltaNet]
HIDDEN = 12
RULES = (("embed", None), ("heads", "model"))


def make(module=ChunkwiseDeltaNet, seed=0, **kwargs):
    defaults = {"gate": "scalar", "use_output_gate": True, "chunk_size": 4}
    return module(HIDDEN, 2, rngs=nnx.Rngs(seed), **(defaults | kwargs))


def inputs(B=2, T=6, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (B, T, HIDDEN), dtype)


def dtype_of(x):
    return x.dtype


def leaves(layer):
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(layer)))
    }


@pytest.mark.parametrize("module", MODULES)
def test_jit_split_and_merge_give_the_eager_numbers(module):
    layer, x = make(module), inputs()
    graphdef, state = nnx.split(layer)
    apply = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    np.testing.assert_allclose(apply(state, x), layer(x), atol=1e-6)
    assert hash(graphdef) == hash(nnx.split(make(module, 1))[0])


@pytest.mark.parametrize("module", MODULES)
def test_scan_over_rematerialised_layers_equals_a_loop(module):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stack(rngs):
        return module(HIDDEN, 2, gate="vector", rngs=rngs)

    layers, x = stack(nnx.Rngs(0)), inputs()
    assert layers.q_proj.kernel.get_metadata()["out_sharding"] == ("layers", "embed", "heads")

    @nnx.scan(
        in_axes=(0, nnx.Carry),
        out_axes=nnx.Carry,
        transform_metadata={nnx.PARTITION_NAME: "layers"},
    )
    @nnx.remat
    def forward(layer, x):
        return x + layer(x)

    def loop(layers, x):
        graphdef, state = nnx.split(layers)
        for i in range(3):
            x = x + nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[i], state))(x)
        return x

    def grads(forward):
        def loss(layers, x):
            y = forward(layers, x)
            return jnp.sum(jnp.sin(y)), y

        gradients, y = nnx.jit(nnx.grad(loss, has_aux=True))(layers, x)
        return y, nnx.to_pure_dict(nnx.state(gradients))

    (y, got), (wanted_y, wanted) = grads(forward), grads(loop)
    tolerance = TOLERANCES["float32"]
    assert_close("y", y, wanted_y, tolerance.forward)
    jax.tree.map(lambda a, b: assert_close("gradient", a, b, tolerance.gradient), got, wanted)


@pytest.mark.parametrize("module", MODULES)
def test_a_layer_is_made_and_called_abstractly(module):
    abstract = nnx.eval_shape(lambda: make(module))
    real = make(module)
    assert {k: (v.shape, v.dtype) for k, v in leaves(abstract).items()} == {
        k: (v.shape, v.dtype) for k, v in leaves(real).items()
    }
    y, cache = jax.eval_shape(lambda x: real.extend(x, real.init_cache(2)), inputs())
    assert y.shape == (2, 6, HIDDEN)
    assert cache.state.dtype == jnp.float32


def test_decoding_in_a_scan_keeps_the_type_of_the_cache():
    layer, x = make(dtype=jnp.bfloat16), inputs(dtype=jnp.bfloat16)

    @jax.jit
    def decode(cache, x):
        def body(cache, token):
            y, cache = layer.extend(token[:, None], cache)
            return cache, y[:, 0]

        return jax.lax.scan(body, cache, jnp.moveaxis(x, 1, 0))

    cache, y = decode(layer.init_cache(2), x)
    whole, wanted = layer.extend(x, layer.init_cache(2))
    assert jax.tree.map(dtype_of, cache) == jax.tree.map(dtype_of, wanted)
    np.testing.assert_allclose(cache.state, wanted.state, atol=5e-3)
    np.testing.assert_allclose(
        jnp.moveaxis(y, 0, 1).astype(jnp.float32), whole.astype(jnp.float32), atol=0.05
    )


def test_vmap_over_a_further_axis_and_forward_mode_work():
    layer = make(gate="vector")
    x = jnp.stack([inputs(seed=s) for s in range(3)])
    np.testing.assert_allclose(jax.vmap(layer)(x)[1], layer(x[1]), atol=1e-6)
    _, tangent = jax.jvp(layer, (x[0],), (x[1],))
    _, transpose = jax.vjp(layer, x[0])
    y = layer(x[2])
    left, right = jnp.vdot(tangent, y), jnp.vdot(transpose(y)[0], x[1])
    np.testing.assert_allclose(left, right, rtol=1e-4)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_bfloat16_computing_is_near_float32(module, gate):
    exact = make(module, gate=gate, use_output_gate=False)
    rough = make(module, gate=gate, use_output_gate=False, dtype=jnp.bfloat16)
    x = inputs(seed=2).astype(jnp.bfloat16)
    y, cache = rough.extend(x, rough.init_cache(2))
    assert y.dtype == jnp.bfloat16
    assert cache.state.dtype == jnp.float32
    assert all(part.dtype == jnp.bfloat16 for part in cache[1:])
    wanted = np.asarray(exact(x.astype(jnp.float32)))
    error = np.asarray(y, np.float32) - wanted
    # Three roundings of 2^-9 in a row of matrix products: projections, operands, output.
    assert np.sqrt(np.mean(error**2) / np.mean(wanted**2)) < 1.5e-2


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_gate_parameters_stay_float32(param_dtype, gate):
    layer = make(gate=gate, param_dtype=param_dtype, dtype=jnp.bfloat16)
    wide = {"['decay']['A_log']", "['decay']['dt_bias']"}
    for path, leaf in leaves(layer).items():
        assert leaf.dtype == (jnp.float32 if path in wide else param_dtype), path


def test_gate_is_computed_in_float32_under_bfloat16():
    layer = make(dtype=jnp.bfloat16, gate="scalar")
    x = inputs(dtype=jnp.bfloat16)
    g, beta = layer._gates(x, jnp.zeros((2, 6, 2, 6), jnp.bfloat16))
    assert g.dtype == beta.dtype == jnp.float32
    logits = layer.a_proj(x).astype(jnp.float32)
    A, bias = layer.decay.A_log[...], layer.decay.dt_bias[...]
    np.testing.assert_allclose(g, -jnp.exp(A) * jnp.logaddexp(0, logits + bias), rtol=1e-6)


def test_initial_decay_has_the_rates_and_steps_of_the_field():
    layer = DeltaNet(256, 128, head_dim=4, gate="vector", rngs=nnx.Rngs(0))
    A = np.exp(np.asarray(layer.decay.A_log[...]))
    step = np.log1p(np.exp(np.asarray(layer.decay.dt_bias[...], np.float64)))
    assert A.shape == (128,)
    assert step.shape == (128, 4)
    assert 0 < A.min() < 1
    assert 15 < A.max() < 16
    assert 7 < A.mean() < 9
    assert step.min() * 1.001 >= 1e-3
    assert step.max() <= 0.1 * 1.001
    # Log-uniform: the median is the geometric mean of the ends.
    assert 0.7e-2 < np.median(step) < 1.4e-2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_reflections_of_rounded_keys_do_not_make_the_state_grow(dtype):
    layer = make(
        RecurrentDeltaNet,
        gate="none",
        use_beta=False,
        allow_neg_eigval=True,
        conv_size=None,
        dtype=dtype,
    )
    layer.v_proj.kernel[...] = jnp.zeros_like(layer.v_proj.kernel[...])
    # One key a row, over and over; rounding makes some of them longer than one.
    x = jnp.broadcast_to(inputs(16, 1), (16, 64, HIDDEN)).astype(dtype)
    k = np.asarray(layer._heads(x[:, :1], None, None, None)[1], np.float64)
    assert np.sum(k**2, axis=-1).max() > 1 + 1e-4
    empty = layer.init_cache(16)
    start = cache = empty._replace(state=empty.state + 1)
    extend = nnx.jit(lambda layer, x, cache: layer.extend(x, cache)[1])
    for _ in range(16):
        cache = extend(layer, x, cache)
    before, after = (np.linalg.norm(c.state, axis=(-2, -1)) for c in (start, cache))
    assert np.all(after <= before * (1 + 1e-4))


def test_float64_is_kept_under_x64():
    with jax.enable_x64(True):
        layer = make(param_dtype=jnp.float64)
        y, cache = layer.extend(inputs(dtype=jnp.float64), layer.init_cache(2))
        assert y.dtype == cache.state.dtype == jnp.float64
        narrow = make()
        y, cache = narrow.extend(inputs(), narrow.init_cache(2))
        assert y.dtype == cache.state.dtype == jnp.float32


def test_parameters_name_their_axes_and_need_no_mesh():
    layer = make(gate="vector", num_v_heads=4)
    names = {
        jax.tree_util.keystr(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(
            nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer))),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
    }
    assert names["['q_proj']['kernel']"] == PartitionSpec("embed", "heads")
    assert names["['o_proj']['kernel']"] == PartitionSpec("heads", "embed")
    assert names["['q_conv']['kernel']"] == PartitionSpec(None, "heads")
    assert names["['decay']['dt_bias']"] == PartitionSpec("heads", None)
    assert len(names) == len(leaves(layer))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_layer_is_made_inside_a_mesh_context(axis_type):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(axis_type, axis_type))
    outside = make()
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        inside = make(seed=1)
        nnx.update(inside, nnx.state(outside))
        shardings = nnx.get_named_sharding(nnx.state(inside), mesh)
    assert shardings["q_proj"]["kernel"].get_value() == NamedSharding(
        mesh, PartitionSpec(None, "model")
    )
    np.testing.assert_array_equal(inside.q_proj.kernel[...], outside.q_proj.kernel[...])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_layer_is_made_abstractly_inside_a_mesh_context(axis_type):
    """Without rules no axis is sharded; names are kept for the rules that come later."""
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(axis_type, axis_type))
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(make)
        assert nnx.get_partition_spec(nnx.state(layer))["q_proj"]["kernel"].get_value() == (
            PartitionSpec(None, None)
        )
    with nnx.logical_axis_rules(RULES):
        spec = nnx.get_partition_spec(nnx.state(layer))["q_proj"]["kernel"].get_value()
    assert spec == PartitionSpec(None, "model")


def test_sharded_parameters_and_batch_give_the_same_numbers():
    if jax.device_count() < 4:
        pytest.skip("needs four devices (--xla_force_host_platform_device_count)")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    layer, x = make(gate="vector"), inputs()
    mask = jnp.ones(x.shape[:2], bool).at[0, :2].set(False)
    wanted = layer(x, mask=mask)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        graphdef, state = nnx.split(layer)
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        got = nnx.jit(lambda m, x, mask: m(x, mask=mask))(nnx.merge(graphdef, state), sharded, mask)
    np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_equal_shapes_with_different_masks_and_segments_trace_once():
    traces = []

    @jax.jit
    def call(x, mask, ids):
        traces.append(1)
        return layer(x, mask=mask, segment_ids=ids)

    layer, x = make(), inputs()
    for seed in range(3):
        keep = jax.random.bernoulli(jax.random.key(seed), 0.5, x.shape[:2])
        call(x, keep, jnp.full(x.shape[:2], seed))
    assert len(traces) == 1
