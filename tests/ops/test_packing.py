"""Several sequences in one row are the same as one row each."""

import functools
import itertools

import jax
import numpy as np
import pytest

from deltanet_jax import linear_attention
from tests.cases import IMPLEMENTATIONS, Inputs, Shape, layer_like, pairs, weak_decay
from tests.checks import assert_matches, run
from tests.oracle import Expected, cotangents_for, expected
from tests.tolerances import TOLERANCES, assert_close

LENGTHS = (5, 1, 64, 3)
SHAPE = Shape(1, sum(LENGTHS), 2, 8, 12)
# The ids are neither sorted nor unique.
SEGMENTS = np.repeat([4, 0, 9, 4], LENGTHS)[None].astype(np.int32)
PER_TOKEN = ("q", "k", "v", "g", "beta")


@functools.cache
def _packed(variant: str) -> tuple[Inputs, Expected]:
    """Inputs of the row, and what four separate calls of the oracle give."""
    inputs = layer_like(variant, SHAPE)
    do, dstate = cotangents_for(inputs)
    edges = np.cumsum((0, *LENGTHS))
    pieces = []
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        piece = {n: x[:, start:stop] if n in PER_TOKEN else x for n, x in inputs.items()}
        if i > 0:
            piece["initial_state"] = np.zeros_like(piece["initial_state"])
        last = stop == SHAPE.T
        pieces.append(expected(piece, (do[:, start:stop], dstate if last else 0 * dstate)))
    join = lambda rows: np.concatenate(rows, axis=1)  # noqa: E731
    gradients = {n: join([p.gradients[n] for p in pieces]) for n in inputs if n != "initial_state"}
    gradients["initial_state"] = pieces[0].gradients["initial_state"]
    want = Expected(join([p.o for p in pieces]), pieces[-1].state, gradients)
    return inputs | {"segment_ids": SEGMENTS}, want


@pytest.mark.parametrize(("variant", "implementation"), pairs(("linear", "delta", "kda")))
def test_packed_equals_separate(variant: str, implementation: str) -> None:
    inputs, want = _packed(variant)
    assert_matches(run(inputs, implementation), want)


def test_the_oracle_packs_too() -> None:
    inputs, want = _packed("gated_delta")
    assert_matches(expected(inputs), want, "float64")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_boundaries_differ_by_row_and_meet_the_edges_of_chunks(implementation: str) -> None:
    """Boundaries at 15, 16, 17, 63, 64, 65 and on neighbouring tokens, before weak gates."""
    inputs = weak_decay("gated_delta", Shape(3, 81, 1, 6, 10))
    ids = np.zeros((3, 81), np.int32)
    for row, starts in enumerate([(16, 64), (15, 16, 17, 65), (1, 2, 63, 80)]):
        ids[row, list(starts)] = 1
    inputs["segment_ids"] = np.cumsum(ids, axis=1).astype(np.int32)
    assert_matches(run(inputs, implementation), expected(inputs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_segment_is_no_packing(implementation: str) -> None:
    inputs = layer_like("delta", Shape(1, 70, 1, 6, 10))
    options = IMPLEMENTATIONS[implementation]
    alone = linear_attention(**inputs, **options)
    packed = linear_attention(**inputs, segment_ids=np.full((1, 70), 3), **options)
    for name, x, y in zip(("o", "state"), packed, alone, strict=True):
        assert_close(name, x, y, TOLERANCES["float32"].forward)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_token_its_own_segment(implementation: str) -> None:
    """Then `o_t = scale (q_t . k_t) beta_t v_t` and nothing else, and the first reads `S_0`."""
    inputs = layer_like("gated_delta", Shape(1, 20, 1, 6, 10))
    ids = np.arange(20, dtype=np.int64)[None] % 2
    o, state = linear_attention(
        **inputs, segment_ids=ids.astype(np.int32), scale=1.0, **IMPLEMENTATIONS[implementation]
    )
    write = inputs["beta"][..., None] * inputs["v"]
    want = np.sum(inputs["q"] * inputs["k"], -1, keepdims=True) * write
    assert_close("o", o[:, 1:], want[:, 1:], TOLERANCES["float32"].forward)
    assert float(abs(o[:, 0] - want[:, 0]).max()) > 1e-2
    last = inputs["k"][:, -1, :, :, None] * write[:, -1, :, None, :]
    assert_close("state", state, last, TOLERANCES["float32"].forward)


def test_nothing_leaks_out_of_a_segment() -> None:
    """Values of an earlier segment, however large, leave the later ones bit-equal."""
    inputs = layer_like("kda", Shape(1, 40, 1, 6, 10))
    ids = np.repeat([0, 1], 20)[None].astype(np.int32)
    loud = inputs | {"v": np.where(ids[..., None, None] == 0, 1e6, inputs["v"]).astype(np.float32)}
    call = jax.jit(functools.partial(linear_attention, implementation="chunkwise", chunk_size=16))
    quiet_o, quiet_state = call(**inputs, segment_ids=ids)
    loud_o, loud_state = call(**loud, segment_ids=ids)
    np.testing.assert_allclose(loud_o[:, 20:], quiet_o[:, 20:], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loud_state, quiet_state, rtol=1e-5, atol=1e-6)
