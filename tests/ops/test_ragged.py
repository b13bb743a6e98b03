"""Ragged rows: every sequence is what it would be alone, with a state of its own."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deltanet_jax as d
from tests.cases import Inputs, Shape, correlated, layer_like, rng_for
from tests.checks import assert_matches, run
from tests.oracle import Expected, cotangents_for, expected
from tests.tolerances import TOLERANCES, assert_close

# Empty first, in the middle, twice in a row and last; one token; over several pieces.
LENGTHS = (0, 37, 1, 0, 0, 70, 5, 0)
SHAPE = Shape(1, sum(LENGTHS), 2, 8, 12, group=2)
N = len(LENGTHS)


def _offsets(lengths: tuple[int, ...]) -> np.ndarray:
    return np.cumsum((0, *lengths)).astype(np.int32)


def _ragged(inputs: Inputs, lengths: tuple[int, ...]) -> tuple[Inputs, tuple, Expected]:
    """A row with one state per sequence, its cotangents, and one row of the oracle for each.

    The oracle's rows are padded to the whole length with tokens that do nothing, so that one
    compilation of it serves all lengths.
    """
    states = rng_for("ragged", lengths).standard_normal(
        (len(lengths), *inputs["initial_state"].shape[1:])
    )
    inputs = inputs | {"initial_state": states.astype(np.float32)}
    do, _ = cotangents_for(inputs)
    dstates = rng_for("dstates", lengths).standard_normal(states.shape).astype(np.float32)
    edges = list(itertools.pairwise(_offsets(lengths)))

    def rows(x: np.ndarray) -> np.ndarray:
        out = np.zeros((len(lengths), *x.shape[1:]), x.dtype)
        for n, (start, stop) in enumerate(edges):
            out[n, : stop - start] = x[0, start:stop]
        return out

    def row(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[n, : b - a] for n, (a, b) in enumerate(edges)])[None]

    batch = {n: x if n == "initial_state" else rows(x) for n, x in inputs.items()}
    alone = expected(batch, (rows(do), dstates))
    gradients = {n: x if n == "initial_state" else row(x) for n, x in alone.gradients.items()}
    want = Expected(row(alone.o), alone.state, gradients)
    return inputs | {"cu_seqlens": _offsets(lengths)}, (do, dstates), want


@functools.cache
def _case(variant: str) -> tuple[Inputs, tuple, Expected]:
    return _ragged(layer_like(variant, SHAPE), LENGTHS)


CASES = [
    ("linear", "chunkwise"),
    ("delta", "chunkwise"),
    ("gla", "recurrent"),
    ("kda", "associative"),
    ("scalar_gla", "associative_chunks"),
    ("gated_delta", "chunkwise_solve"),
]


@pytest.mark.parametrize(("variant", "implementation"), CASES)
def test_ragged_equals_separate(variant: str, implementation: str) -> None:
    inputs, cotangents, want = _case(variant)
    assert_matches(run(inputs, implementation, cotangents=cotangents), want)


def test_ragged_equals_separate_for_keys_that_repeat() -> None:
    """Maps of pieces are composed where the erasing factors are near -1."""
    inputs, cotangents, want = _ragged(correlated("delta", SHAPE, cos=0.99), LENGTHS)
    assert_matches(run(inputs, "chunkwise", cotangents=cotangents), want)


def test_ragged_equals_separate_in_the_kernel() -> None:
    """The interpreted TPU kernel, whose state must survive in float32 from piece to piece."""
    lengths = (0, 20, 3)
    inputs, _, want = _ragged(layer_like("gated_delta", Shape(1, 23, 1, 64, 64)), lengths)
    o, states = jax.jit(functools.partial(d.linear_attention, implementation="pallas"))(**inputs)
    assert_close("o", o, want.o, TOLERANCES["float32"].forward)
    assert_close("states", states, want.state, TOLERANCES["float32"].forward)


NARROW = {
    "uint8": [3] * 40,
    "int8": [3] * 40,
    "int16": [1] * 3000,
    "uint16": [1] * 3000,
    "uint32": [5, 0, 7],
    "int64": [5, 0, 7],
}


@pytest.mark.parametrize("dtype", NARROW)
def test_offsets_of_every_integer_type_give_the_same(dtype: str) -> None:
    """Nothing is computed in the caller's type, in which sums of offsets would wrap."""
    offsets = np.cumsum([0, *NARROW[dtype]])
    x = jnp.ones((1, offsets[-1], 1, 2)) / 2
    run = jax.jit(d.linear_attention)
    want = run(x, x, x, cu_seqlens=offsets.astype(np.int32))
    got = run(x, x, x, cu_seqlens=offsets.astype(dtype))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    lengths = np.asarray(NARROW[dtype]).astype(dtype)
    np.testing.assert_array_equal(d.lengths_to_cu_seqlens(lengths), offsets)
    assert d.pack_padded(jnp.ones((len(lengths), 7)), offsets.astype(dtype)).shape == (
        1,
        offsets[-1],
    )


def test_one_sequence_as_long_as_its_type_can_say() -> None:
    x = jnp.ones((1, 127, 1, 2)) / 2
    want = d.linear_attention(x, x, x)[0]
    got = d.linear_attention(x, x, x, cu_seqlens=np.asarray([0, 127], np.int8))[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_without_states_sequences_start_from_zero() -> None:
    inputs = {n: x for n, x in _case("delta")[0].items() if n != "initial_state"}
    offsets = inputs.pop("cu_seqlens")
    o, states = d.linear_attention(**inputs, cu_seqlens=offsets, implementation="recurrent")
    ids = d.cu_seqlens_to_segment_ids(offsets, SHAPE.T)
    packed, _ = d.linear_attention(**inputs, segment_ids=ids, implementation="recurrent")
    assert states.shape == (N, SHAPE.HV, SHAPE.K, SHAPE.V)
    assert states.dtype == jnp.float32
    assert_close("o", o, packed, TOLERANCES["float32"].forward)


def test_one_compilation_serves_all_batches_of_a_size() -> None:
    traces = []

    @jax.jit
    def call(inputs: Inputs) -> tuple:
        traces.append(1)
        return d.linear_attention(**inputs, implementation="recurrent")

    for lengths in (
        LENGTHS,
        LENGTHS[::-1],
        (113,) + (0,) * 7,
        (0,) * 7 + (113,),
        (14,) * 7 + (15,),
    ):
        case, _, want = _ragged(layer_like("delta", SHAPE), lengths)
        o, states = call(case)
        assert_close("o", o, want.o, TOLERANCES["float32"].forward)
        assert_close("states", states, want.state, TOLERANCES["float32"].forward)
        empty = np.array(lengths) == 0
        np.testing.assert_array_equal(states[empty], case["initial_state"][empty])
    assert len(traces) == 1


def test_no_tokens_at_all() -> None:
    shape = Shape(1, 0, 1, 4, 6)
    inputs = layer_like("delta", shape) | {
        "initial_state": np.ones((3, 1, 4, 6), np.float32),
        "cu_seqlens": np.zeros(4, np.int32),
    }
    o, states = d.linear_attention(**inputs)
    assert o.shape == (1, 0, 1, 6)
    np.testing.assert_array_equal(states, inputs["initial_state"])


def test_the_normaliser_is_ragged_too() -> None:
    inputs, _, _ = _case("linear")
    x = {n: np.abs(inputs[n]) for n in ("q", "k", "v")}
    offsets = inputs["cu_seqlens"]
    call = functools.partial(d.normalized_linear_attention, implementation="recurrent")
    o, states = call(**x, cu_seqlens=offsets)
    ids = d.cu_seqlens_to_segment_ids(offsets, SHAPE.T)
    want, _ = call(**x, segment_ids=ids)
    assert_close("o", o, want, TOLERANCES["float32"].forward)
    assert states.shape == (N, SHAPE.HV, SHAPE.K, SHAPE.V + 1)


WRONG = {
    "falls": ([0, 60, 50, 113], "must not fall; got 60 and then 50 at 2"),
    "start": ([1, 60, 113], "must start with 0; got 1"),
    "end": ([0, 60, 112], "must end with T = 113; got 112"),
    "beyond": ([0, 60, 114], "must end with T = 113; got 114"),
    "rank": ([[0, 113]], "must have shape"),
    "none": ([0], "got shape"),
    "float": ([0.0, 113.0], "integer dtype"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_offsets_are_named(name: str) -> None:
    offsets, message = WRONG[name]
    inputs = layer_like("delta", SHAPE)
    del inputs["initial_state"]
    with pytest.raises(ValueError, match="`cu_seqlens`.*" + message):
        d.linear_attention(**inputs, cu_seqlens=np.array(offsets))


def test_what_does_not_go_with_offsets_is_named() -> None:
    inputs, two = layer_like("delta", SHAPE), layer_like("delta", SHAPE._replace(B=2))
    offsets = np.array([0, 60, 113])
    ids = np.zeros((1, 113), np.int32)
    with pytest.raises(ValueError, match="`cu_seqlens` and `segment_ids` exclude"):
        d.linear_attention(**inputs, cu_seqlens=offsets, segment_ids=ids)
    with pytest.raises(ValueError, match=r"`initial_state` must have shape \[N, HV, K, V\] = \[2"):
        d.linear_attention(**inputs, cu_seqlens=offsets)
    with pytest.raises(ValueError, match="one row; wanted `q` with B = 1, got B = 2"):
        d.linear_attention(**two, cu_seqlens=offsets)
    with pytest.raises(ValueError, match="`cu_seqlens` must be an integer array"):
        d.linear_attention(**inputs, cu_seqlens=[0, 113])
    del inputs["initial_state"]
    assert d.why_not("chunkwise", **inputs, cu_seqlens=offsets) is None


def test_offsets_ids_and_padded_batches_are_the_same_thing() -> None:
    lengths = (3, 0, 5, 1)
    offsets = d.lengths_to_cu_seqlens(np.array(lengths))
    np.testing.assert_array_equal(offsets, [0, 3, 3, 8, 9])
    ids = d.cu_seqlens_to_segment_ids(offsets, 9)
    np.testing.assert_array_equal(ids, [[0, 0, 0, 2, 2, 2, 2, 2, 3]])
    # Ids cannot hold a sequence without tokens; asked for four, the fourth is empty.
    np.testing.assert_array_equal(d.segment_ids_to_cu_seqlens(ids), [0, 3, 8, 9])
    ask = jax.jit(d.segment_ids_to_cu_seqlens, static_argnames="num_sequences")
    np.testing.assert_array_equal(ask(ids, num_sequences=4), [0, 3, 8, 9, 9])
    row = jnp.arange(18.0).reshape(1, 9, 2) + 1
    padded, mask = d.pad_packed(row, offsets, 6)
    assert padded.shape == (4, 6, 2)
    np.testing.assert_array_equal(mask.sum(1), lengths)
    assert float(jnp.sum(padded, where=~mask[..., None])) == 0
    np.testing.assert_array_equal(d.pack_padded(padded, offsets), row)
    np.testing.assert_array_equal(d.lengths_to_cu_seqlens(mask.sum(1)), offsets)
    pack = jax.jit(d.pack_padded, static_argnames="total")
    np.testing.assert_array_equal(pack(padded, offsets, total=9), row)


def test_wrong_conversions_are_named() -> None:
    row, offsets = jnp.ones((1, 9, 2)), np.array([0, 3, 9])
    with pytest.raises(ValueError, match="longer than 5 tokens.*one of 6"):
        d.pad_packed(row, offsets, 5)
    with pytest.raises(ValueError, match=r"`x` must have shape \[1, T"):
        d.pad_packed(row[0], offsets, 5)
    with pytest.raises(ValueError, match="`x` must have shape.*N = 2"):
        d.pack_padded(row, offsets)
    with pytest.raises(ValueError, match="`total` must be given"):
        jax.jit(d.pack_padded)(jnp.ones((2, 9)), offsets)
    with pytest.raises(ValueError, match="number of runs, 3; got 2"):
        d.segment_ids_to_cu_seqlens(np.array([[0, 1, 0]]), 2)
    with pytest.raises(ValueError, match="`num_sequences`.*under `jit`"):
        jax.jit(d.segment_ids_to_cu_seqlens)(np.zeros((1, 3), np.int32))
    with pytest.raises(ValueError, match="`lengths` must be >= 0; got -1"):
        d.lengths_to_cu_seqlens(np.array([2, -1]))
