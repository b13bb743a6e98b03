"""The operators inside plain JAX and Equinox models, and in the place of softmax attention."""

import importlib
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import delta_rule
from deltanet_jax.core import reference
from examples import plain_jax
from examples.drop_in_attention import delta_rule_attention, fastest_attention
from examples.equinox_model import Mixer


def test_a_plain_jax_model_learns_and_decodes():
    p = plain_jax.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, 32)
    update = jax.jit(
        lambda p: jax.tree.map(lambda x, d: x - 0.1 * d, p, jax.grad(plain_jax.loss)(p, tokens))
    )
    before, trained = plain_jax.loss(p, tokens), p
    for _ in range(5):
        trained = update(trained)
    assert plain_jax.loss(trained, tokens) < before
    states, got = jnp.zeros((2, 2, 2, 8, 8)), []
    decode = jax.jit(plain_jax.next_logits)
    for t in range(20):
        row, states = decode(p, tokens[:, t], states)
        got.append(row)
    np.testing.assert_allclose(
        jnp.stack(got, axis=1), plain_jax.logits(p, tokens), rtol=1e-4, atol=1e-4
    )


def test_an_equinox_mixer_is_batched_differentiated_and_causal():
    mixer = Mixer(16, 2, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, 20, 16))
    y = eqx.filter_jit(lambda m, x: jax.vmap(m)(x))(mixer, x)
    np.testing.assert_allclose(y[1], mixer(x[1]), atol=1e-5)
    np.testing.assert_allclose(y[:, :9], jax.vmap(mixer)(x.at[:, 9:].set(0))[:, :9], atol=1e-5)
    gradient = eqx.filter_grad(lambda m: jnp.sum(jnp.sin(jax.vmap(m)(x))))(mixer)
    for g in jax.tree.leaves(eqx.filter(gradient, eqx.is_array)):
        assert np.all(np.isfinite(g))
        assert np.any(np.asarray(g) != 0)


def unit(x):
    return np.asarray(x) / np.linalg.norm(x, axis=-1, keepdims=True)


def test_the_drop_in_takes_what_dot_product_attention_takes():
    ours, theirs = (
        inspect.signature(f).parameters
        for f in (delta_rule_attention, jax.nn.dot_product_attention)
    )
    assert list(theirs)[:5] == list(ours)[:5]
    assert set(ours) - {"beta"} <= set(theirs)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 10, 4, 8))
    k, v = k[:, :, :2], v[:, :, :2]
    kwargs = {"is_causal": True, "key_value_seq_lengths": jnp.asarray([10, 6])}
    assert (
        delta_rule_attention(q, k, v, **kwargs).shape
        == jax.nn.dot_product_attention(q, k, v, **kwargs).shape
    )


def test_the_drop_in_is_the_delta_rule_over_grouped_heads():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 10, 4, 8))
    k, v = k[:, :, :2], v[:, :, :2]
    lengths = jnp.asarray([10, 6])
    got = fastest_attention(q, k, v, key_value_seq_lengths=lengths, query_seq_lengths=lengths)
    wide_k, wide_v = (np.repeat(np.asarray(x), 2, axis=2) for x in (k, v))
    want, _ = reference.recurrence(unit(q), unit(wide_k), wide_v, beta=np.ones((2, 10, 4)))
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    np.testing.assert_allclose(got[1, :6], want[1, :6], atol=1e-5)
    assert np.all(np.asarray(got[1, 6:]) == 0)
    beta = jnp.full((2, 10, 4), 0.5)
    np.testing.assert_allclose(
        delta_rule_attention(q, k, v, beta=beta, scale=1.0),
        delta_rule(unit(q), unit(wide_k), wide_v, beta, scale=1.0)[0],
        atol=1e-5,
    )


@pytest.mark.parametrize("change", [{"is_causal": False}, {"mask": 1}, {"bias": 1}])
def test_the_drop_in_refuses_what_a_recurrence_cannot_do(change):
    x = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="causal"):
        delta_rule_attention(x, x, x, **change)
    with pytest.raises(ValueError, match="`key` must fit"):
        delta_rule_attention(x, x[:, :3], x[:, :3])


@pytest.mark.parametrize(
    ("module", "printed"),
    [
        ("plain_jax", "decoded: [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]"),
        ("drop_in_attention", "delta rule: (2, 64, 4, 16)"),
        ("equinox_model", "outputs: (4, 20, 32)"),
        ("linen_model", "P('layers', 'embed', 'heads')"),
    ],
)
def test_an_example_prints_its_result(module, printed, capsys):
    importlib.import_module(f"examples.{module}").main()
    assert printed in capsys.readouterr().out
