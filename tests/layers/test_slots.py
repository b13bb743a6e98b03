"""Slots of a cache: nothing of an old request reaches a new one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deltanet_jax import RecurrentDeltaNet
from deltanet_jax.layers import copy_slots, put_slots, reset_slots, select_slots

B, T, HIDDEN = 3, 5, 8


@pytest.fixture(scope="module")
def layer():
    return RecurrentDeltaNet(HIDDEN, 2, gate="scalar", rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def extend():
    return nnx.jit(lambda layer, x, cache, mask: layer.extend(x, cache, mask=mask))


def _x(seed=0):
    return jax.random.normal(jax.random.key(seed), (B, T, HIDDEN))


def _equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_stale_contents_never_reach_a_new_request(layer, extend, garbage):
    """Neither the request in the slot that is reset, nor those in the slots beside it."""
    mask = jnp.ones((B, T), bool)
    want_y, want = extend(layer, _x(), layer.init_cache(B), mask)
    stale = jax.tree.map(lambda x: jnp.full_like(x, garbage), layer.init_cache(B))
    y, cache = extend(layer, _x(), reset_slots(stale, jnp.array([True, False, True])), mask)
    for row in (0, 2):
        np.testing.assert_array_equal(y[row], want_y[row])
        _equal(*(jax.tree.map(lambda x, row=row: x[row], c) for c in (cache, want)))


def test_a_slot_that_reads_nothing_keeps_its_state_to_the_bit(layer, extend):
    _, cache = extend(layer, _x(), layer.init_cache(B), jnp.ones((B, T), bool))
    mask = jnp.array([[True] * T, [False] * T, [True] * 2 + [False] * 3])
    garbage = jnp.where(mask[..., None], _x(1), jnp.nan)
    _, after = extend(layer, garbage, cache, mask)
    _equal(*(jax.tree.map(lambda x: x[1], c) for c in (after, cache)))


def test_a_rejected_draft_is_rolled_back(layer, extend):
    """Kept, drafted, rolled back where it was rejected, read again as far as it was accepted."""
    kept = extend(layer, _x(), layer.init_cache(B), jnp.ones((B, T), bool))[1]
    _, drafted = extend(layer, _x(1), kept, jnp.ones((B, T), bool))
    rejected = jnp.array([False, True, True])
    accepted = jnp.arange(T) < jnp.array([0, 2, 0])[:, None]
    _, cache = extend(layer, _x(1), select_slots(rejected, kept, drafted), accepted)
    _, wanted = extend(layer, _x(1), kept, jnp.arange(T) < jnp.array([T, 2, 0])[:, None])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), cache, wanted)


def test_a_prefix_is_copied_and_rows_are_put(layer, extend):
    _, cache = extend(layer, _x(), layer.init_cache(B), jnp.ones((B, T), bool))
    shared = copy_slots(cache, np.array([0, 0, 1]))
    _equal(shared, jax.tree.map(lambda x: x[jnp.array([0, 0, 1])], cache))
    rows = jax.tree.map(lambda x: x[:2], cache)
    put = put_slots(layer.init_cache(B), np.array([2, B]), rows)
    _equal(jax.tree.map(lambda x: x[2], put), jax.tree.map(lambda x: x[0], cache))
    assert float(jnp.abs(put.state[:2]).max()) == 0, "a slot out of range takes nothing"


def test_wrong_slots_and_caches_are_named(layer):
    cache = layer.init_cache(B)
    other = RecurrentDeltaNet(HIDDEN, 1, rngs=nnx.Rngs(0)).init_cache(B)
    with pytest.raises(ValueError, match=r"`slots` must be a boolean array \[3\]; got int"):
        reset_slots(cache, np.array([0, 1, 2]))
    with pytest.raises(ValueError, match=r"`slots` must be a boolean array \[3\]; got bool \(2,\)"):
        reset_slots(cache, np.ones(2, bool))
    with pytest.raises(ValueError, match="of one configuration"):
        select_slots(np.ones(B, bool), other, cache)
    with pytest.raises(ValueError, match=r"`source` must name slots in \[0, 3\)"):
        copy_slots(cache, np.array([0, 1, 3]))
    with pytest.raises(ValueError, match="`slots` must be an integer array"):
        put_slots(cache, np.ones(B, bool), cache)
    with pytest.raises(ValueError, match=r"`cache.state` does not fit"):
        layer.extend(_x(), other)
    rounded = cache._replace(state=cache.state.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="`cache.state` must be float32.*got bfloat16"):
        layer.extend(_x(), rounded)
