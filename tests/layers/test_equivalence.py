"""The three modules are one layer: same parameters, outputs, states and gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import deltanet_jax
from deltanet_jax import AssociativeDeltaNet, ChunkwiseDeltaNet, DeltaNet, RecurrentDeltaNet
from deltanet_jax.core import reference

MODULES = [RecurrentDeltaNet, AssociativeDeltaNet, ChunkwiseDeltaNet, DeltaNet]
HIDDEN, HEADS = 12, 2

# Each differs from the default in several options; together they name every value of each.
OPTIONS = {
    "default": {},
    "scalar-gva-gated-reflections": {
        "gate": "scalar",
        "num_v_heads": 4,
        "expand_v": 1.5,
        "head_dim": 8,
        "use_output_gate": True,
        "allow_neg_eigval": True,
    },
    "vector-dpfp-sum": {"gate": "vector", "feature_map": "dpfp", "dpfp_nu": 2, "qk_norm": "sum"},
    "bare": {"conv_size": None, "use_beta": False, "feature_map": "identity"},
    "elu-sum-wide-conv-sigmoid": {
        "use_output_gate": True,
        "output_gate_activation": "sigmoid",
        "feature_map": "elu",
        "qk_norm": "sum",
        "conv_size": 7,
    },
    "relu-vector-one-tap": {"feature_map": "relu", "gate": "vector", "conv_size": 1},
}
options = pytest.mark.parametrize("kwargs", OPTIONS.values(), ids=OPTIONS)


def make(module, seed=0, chunk_size=4, **kwargs):
    if module in (RecurrentDeltaNet, DeltaNet):
        chunk_size = None
    return module(HIDDEN, HEADS, chunk_size=chunk_size, rngs=nnx.Rngs(seed), **kwargs)


def inputs(T=6, B=2, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (B, T, HIDDEN), dtype)


def close(actual, desired, tol=2e-6):
    """Root mean square of the difference, relative to that of `desired`."""
    actual, desired = np.asarray(actual, np.float64), np.asarray(desired, np.float64)
    error = np.sqrt(np.mean((actual - desired) ** 2))
    size = np.sqrt(np.mean(desired**2))
    assert error <= tol * max(size, 1e-6), f"relative error {error / max(size, 1e-6):.2e}"


def loss_and_everything(layer, x):
    """Output, final state and the gradients of both by one loss."""

    def loss(layer):
        y, cache = layer.extend(x, layer.init_cache(x.shape[0]))
        return jnp.sum(jnp.sin(3 * y)) + jnp.sum(jnp.cos(cache.state)), (y, cache)

    (_, aux), grads = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(layer)
    return aux, nnx.to_pure_dict(nnx.state(grads))


@options
def test_modules_have_equal_outputs_states_and_parameter_gradients(kwargs):
    x = inputs()
    first = make(MODULES[0], **kwargs)
    (y, cache), grads = loss_and_everything(first, x)
    assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grads))
    for seed, module in enumerate(MODULES[1:], start=1):
        other = make(module, seed, **kwargs)
        nnx.update(other, nnx.state(first))
        (y2, cache2), grads2 = loss_and_everything(other, x)
        close(y2, y)
        chex.assert_trees_all_equal_shapes_and_dtypes(cache2, cache)
        chex.assert_trees_all_close(cache2, cache, atol=2e-6, rtol=2e-5)
        chex.assert_trees_all_equal_shapes_and_dtypes(grads2, grads)
        jax.tree.map(lambda a, b: close(a, b, 1e-5), grads2, grads)


@options
def test_parameter_tree_does_not_depend_on_the_module(kwargs):
    states = [nnx.state(make(module, **kwargs)) for module in MODULES]
    for state in states[1:]:
        chex.assert_trees_all_equal(nnx.to_pure_dict(state), nnx.to_pure_dict(states[0]))


def test_modules_differ_in_one_class_attribute():
    names = [vars(module)["implementation"] for module in MODULES]
    assert names == ["recurrent", "associative", "chunkwise", None]
    for module in MODULES[:3]:
        assert [n for n in vars(module) if not n.startswith("_")] == ["implementation"]
        assert issubclass(module, DeltaNet)
        assert getattr(deltanet_jax, module.__name__) is module


def test_implementation_of_the_base_overrides_the_class_attribute():
    seen = []

    def spy(problem, chunk_size):
        seen.append(chunk_size)
        B, T, HV, V = problem.v.shape
        return jnp.zeros((B, T, HV, V)), jnp.zeros((B, HV, problem.k.shape[-1], V))

    layer = DeltaNet(HIDDEN, HEADS, implementation=spy, chunk_size=3, rngs=nnx.Rngs(0))
    assert np.all(np.asarray(layer(inputs())) == 0)
    assert seen == [3]
    assert DeltaNet.implementation is None
    several = DeltaNet(HIDDEN, HEADS, implementation=["pallas", "recurrent"], rngs=nnx.Rngs(0))
    assert several.implementation == ("pallas", "recurrent")
    close(several(inputs()), RecurrentDeltaNet(HIDDEN, HEADS, rngs=nnx.Rngs(0))(inputs()))


def by_hand(layer, x):
    """The default layer in NumPy float64, token by token."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(layer)))
    x = np.asarray(x, np.float64)
    B, T, _ = x.shape

    def conv(name):
        y = x @ p[f"{name}_proj"]["kernel"]
        out = np.zeros_like(y)
        for t in range(T):
            for j in range(4):
                if t - 3 + j >= 0:
                    out[:, t] += p[f"{name}_conv"]["kernel"][j] * y[:, t - 3 + j]
        return (out / (1 + np.exp(-out))).reshape(B, T, HEADS, -1)

    q, k, v = conv("q"), conv("k"), conv("v")
    q, k = (u / np.linalg.norm(u, axis=-1, keepdims=True) for u in (q, k))
    beta = 1 / (1 + np.exp(-(x @ p["b_proj"]["kernel"])))
    o = np.zeros_like(v)
    S = np.zeros((B, HEADS, k.shape[-1], v.shape[-1]))
    for t in range(T):
        error = v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + np.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        o[:, t] = k.shape[-1] ** -0.5 * np.einsum("bhk,bhkv->bhv", q[:, t], S)
    o = o / np.sqrt(np.mean(o**2, -1, keepdims=True) + 1e-5) * p["o_norm"]["scale"]
    return o.reshape(B, T, -1) @ p["o_proj"]["kernel"], S


@pytest.mark.parametrize("module", MODULES)
def test_default_layer_is_what_its_docstring_says(module):
    layer, x = make(module, 5), inputs(seed=7)
    y, cache = layer.extend(x, layer.init_cache(2))
    wanted, state = by_hand(layer, x)
    close(y, wanted, 1e-5)
    close(cache.state, state, 1e-5)


def test_gates_reach_the_operator_with_their_signs_and_ranges(monkeypatch):
    calls = []
    real = deltanet_jax.layers.delta_net.linear_attention

    def spy(q, k, v, **kwargs):
        calls.append((q, k, v, kwargs))
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(deltanet_jax.layers.delta_net, "linear_attention", spy)
    for gate, rank in [("scalar", 3), ("vector", 4)]:
        layer = make(ChunkwiseDeltaNet, gate=gate, num_v_heads=4, allow_neg_eigval=True)
        y, _ = layer._mix(inputs(), None, None, None)  # not compiled as a whole
        q, k, v, kwargs = calls.pop()
        g, beta = kwargs["g"], kwargs["beta"]
        assert g.ndim == rank
        assert g.shape[2] == 4
        assert float(g.max()) < 0
        assert float(g.min()) > -16 * 6
        assert float(beta.min()) > 0
        assert 1 < float(beta.max()) < 2
        close(jnp.linalg.norm(k, axis=-1), np.ones(k.shape[:3]), 1e-4)
        q, k, v, g, beta = map(np.asarray, (q, k, v, g, beta))
        o, _ = reference.recurrence(q, k, v, g=g, beta=beta)
        close(y, layer._output(jnp.asarray(o, jnp.float32), inputs()), 1e-5)


@pytest.mark.parametrize(("kwargs", "wanted"), [({}, 1.0), ({"allow_neg_eigval": True}, 2.0)])
def test_without_beta_the_rule_writes_at_full_strength(kwargs, wanted, monkeypatch):
    seen = []
    real = deltanet_jax.layers.delta_net.linear_attention
    monkeypatch.setattr(
        deltanet_jax.layers.delta_net,
        "linear_attention",
        lambda *a, **kw: seen.append(kw["beta"]) or real(*a, **kw),
    )
    layer = make(ChunkwiseDeltaNet, use_beta=False, qk_norm="none", **kwargs)
    layer._mix(inputs(), None, None, None)  # not compiled as a whole
    assert np.all(np.asarray(seen[0]) == wanted)
