"""Masked tokens are absent, and packed sequences do not see each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from deltanet_jax import AssociativeDeltaNet, ChunkwiseDeltaNet, RecurrentDeltaNet
from deltanet_jax.layers.padding import pack, runs_of

MODULES = [RecurrentDeltaNet, AssociativeDeltaNet, ChunkwiseDeltaNet]
HIDDEN, T = 12, 9
GARBAGE = [np.nan, np.inf, -np.inf, 1e30]


def make(module, **kwargs):
    defaults = {"gate": "scalar", "use_output_gate": True, "chunk_size": 4}
    return module(HIDDEN, 2, rngs=nnx.Rngs(3), **(defaults | kwargs))


def sequences(B=2, length=T, seed=0):
    return jax.random.normal(jax.random.key(seed), (B, length, HIDDEN))


def padded(x, left, right, garbage):
    """`x` between garbage, and the mask that says so."""
    shape = [(0, 0), (left, right), (0, 0)]
    mask = np.pad(np.ones(x.shape[:2], bool), shape[:2])
    return jnp.where(mask[..., None], jnp.pad(x, shape), garbage), jnp.asarray(mask)


def value_and_grads(layer, x, mask=None, segment_ids=None):
    def loss(layer, x):
        y = layer(x, mask=mask, segment_ids=segment_ids)
        return jnp.sum(jnp.sin(3 * y)), y

    (_, y), grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return y, nnx.to_pure_dict(nnx.state(grads[0])), grads[1]


def assert_close(actual, desired, atol=1e-6):
    """Equal to `atol`, absolute where values are small and relative where they are large."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=atol), actual, desired
    )


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("left", "right"), [(1, 0), (5, 0), (0, 3), (2, 4)])
def test_padding_with_garbage_changes_no_output_and_no_cache(module, left, right):
    layer, x = make(module), sequences()
    y, cache = layer.extend(x, layer.init_cache(2))
    for garbage in GARBAGE:
        xp, mask = padded(x, left, right, garbage)
        yp, cachep = layer.extend(xp, layer.init_cache(2), mask=mask)
        assert_close(yp[:, left : left + T], y)
        assert_close(cachep, cache)
        assert np.all(np.asarray(yp)[~np.asarray(mask)] == 0)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("gate", ["none", "vector"])
def test_padding_with_garbage_changes_no_gradient(module, gate):
    layer, x = make(module, gate=gate), sequences()
    y, grads, dx = value_and_grads(layer, x)
    xp, mask = padded(x, 2, 3, np.nan)
    yp, gradsp, dxp = value_and_grads(layer, xp, mask=mask)
    assert_close(yp[:, 2 : 2 + T], y)
    assert_close(gradsp, grads, 1e-5)
    assert_close(dxp[:, 2 : 2 + T], dx, 1e-5)
    assert np.all(np.asarray(dxp)[~np.asarray(mask)] == 0)


PATTERNS = st.lists(st.booleans(), min_size=T, max_size=T)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(PATTERNS, PATTERNS, st.sampled_from(GARBAGE))
def test_any_mask_acts_as_if_masked_tokens_were_absent(layer_and_call, first, second, garbage):
    layer, call = layer_and_call
    x = sequences()
    mask = np.array([first, second])
    start = layer.extend(sequences(seed=1), layer.init_cache(2))[1]
    y, cache = call(layer, jnp.where(mask[..., None], x, garbage), start, jnp.asarray(mask))
    for row in range(2):
        # The tokens that are left, at the front, so that every example compiles once.
        n = int(mask[row].sum())
        left = np.zeros((2, T, HIDDEN), np.float32)
        left[row, :n] = np.asarray(x)[row, mask[row]]
        front = np.zeros((2, T), bool)
        front[row, :n] = True
        yr, cacher = call(layer, jnp.asarray(left), start, jnp.asarray(front))
        assert_close(y[row][mask[row]], yr[row, :n])
        assert_close(*(jax.tree.map(lambda part: part[row], c) for c in (cache, cacher)))


@pytest.fixture(scope="module")
def layer_and_call():
    return make(ChunkwiseDeltaNet), nnx.jit(lambda layer, x, c, mask: layer.extend(x, c, mask=mask))


def test_a_row_without_real_tokens_leaves_its_cache_untouched():
    layer = make(ChunkwiseDeltaNet)
    start = layer.extend(sequences(), layer.init_cache(2))[1]
    mask = jnp.array([[False] * 3, [True] * 3])
    _, end = layer.extend(sequences(length=3, seed=4), start, mask=mask)
    for before, after in zip(start, end, strict=True):
        np.testing.assert_array_equal(before[0], after[0])
        assert np.any(np.asarray(before[1] != after[1]))


LENGTHS = [5, 1, 4, 2]
IDS = np.repeat([7, 3, 7, 0], LENGTHS)[None]  # the id 7 comes back: it is another sequence


@pytest.mark.parametrize("module", MODULES)
def test_packed_sequences_equal_separate_ones(module):
    layer, x = make(module), sequences(1, sum(LENGTHS))
    y, grads, dx = value_and_grads(layer, x, segment_ids=jnp.asarray(IDS))
    total, start = None, 0
    for n in LENGTHS:
        part = slice(start, start + n)
        y1, grads1, dx1 = value_and_grads(layer, x[:, part])
        assert_close(y[:, part], y1)
        assert_close(dx[:, part], dx1, 1e-5)
        total = grads1 if total is None else jax.tree.map(jnp.add, total, grads1)
        start += n
    assert_close(grads, total, 1e-5)


@pytest.mark.parametrize("module", MODULES)
def test_no_gradient_crosses_a_segment_border(module):
    layer, x = make(module), sequences(1, sum(LENGTHS))

    def last(x):
        return jnp.sum(layer(x, segment_ids=jnp.asarray(IDS))[:, -1])

    dx = np.asarray(jax.grad(last)(x))
    assert np.all(dx[:, : -LENGTHS[-1]] == 0)
    assert np.all(np.any(dx[:, -LENGTHS[-1] :] != 0, -1))


def test_mask_and_segments_together_are_packing_of_the_real_tokens():
    layer = make(ChunkwiseDeltaNet)
    x = sequences(1, sum(LENGTHS))
    y = layer(x, segment_ids=jnp.asarray(IDS))
    for left, right in [(3, 0), (0, 2)]:
        xp, mask = padded(x, left, right, np.nan)
        ids = jnp.asarray(np.pad(IDS, [(0, 0), (left, right)], constant_values=99))
        yp = layer(xp, mask=mask, segment_ids=ids)
        assert_close(yp[:, left : left + x.shape[1]], y)


def test_runs_count_borders_between_real_tokens_only():
    ids = jnp.array([[5, 5, 9, 5, 2, 2, 0]])
    np.testing.assert_array_equal(runs_of(ids), [[0, 0, 1, 2, 3, 3, 4]])
    packing = pack(jnp.array([[True, True, False, True, True, False, False]]))
    np.testing.assert_array_equal(runs_of(ids, packing), [[0, 0, 0, 1, 1, 1, 1]])


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("pieces", [[1] * T, [2, 1, 6], [3, 3, 3], [8, 1], [0, 4, 5]])
def test_a_sequence_in_pieces_equals_the_whole(module, pieces):
    layer, x = make(module, conv_size=5, gate="vector"), sequences()
    y, wanted = layer.extend(x, layer.init_cache(2))
    assert_close(layer(x), y)
    cache, outputs, start = layer.init_cache(2), [], 0
    for n in pieces:
        part, cache = layer.extend(x[:, start : start + n], cache)
        outputs.append(part)
        start += n
    assert_close(jnp.concatenate(outputs, axis=1), y)
    assert_close(cache, wanted)


def test_ragged_pieces_continue_each_row_by_itself():
    layer, x = make(RecurrentDeltaNet), sequences()
    y, wanted = layer.extend(x, layer.init_cache(2))
    # Row 0 reads 2 tokens and then 7; row 1 reads 6 and then 3.
    first = [2, 6]
    cache = layer.init_cache(2)
    for lengths, offsets in [(first, [0, 0]), ([T - n for n in first], first)]:
        mask = np.arange(7) < np.array(lengths)[:, None]
        piece = np.full((2, 7, HIDDEN), np.nan, np.float32)
        for row in range(2):
            piece[row, mask[row]] = x[row, offsets[row] : offsets[row] + lengths[row]]
        out, cache = layer.extend(jnp.asarray(piece), cache, mask=jnp.asarray(mask))
        for row in range(2):
            assert_close(out[row][mask[row]], y[row, offsets[row] : offsets[row] + lengths[row]])
    assert_close(cache, wanted)


@pytest.mark.parametrize("module", MODULES)
def test_future_tokens_do_not_change_the_past(module):
    layer, x = make(module), sequences()
    changed = x.at[:, 5:].set(sequences(seed=8)[:, 5:])
    np.testing.assert_array_equal(layer(x)[:, :5], layer(changed)[:, :5])
