"""Lengths around the edges of chunks, blocks and segments."""

import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import linear_attention
from deltanet_jax.ops.chunkwise import PAIRS_FROM
from tests.cases import IMPLEMENTATIONS, PORTABLE, VARIANTS, Shape, layer_like, weak_decay
from tests.checks import assert_matches, run
from tests.oracle import expected

# The variant differs by algorithm, so that together they cover the kinds of gate.
PAIRS = [
    ("gla", "recurrent", 16),
    ("delta", "associative_chunks", 16),
    ("kda", "chunkwise", 16),
    ("gated_delta", "chunkwise_solve", 16),
]


def _edges() -> list:
    cases = [(*pair, T) for pair in PAIRS for T in (1, 2, 15, 16, 17, 33, 48)]
    cases += [("delta", "chunkwise", 64, T) for T in (63, 64, 65, 129, 192)]
    cases += [("gated_delta", "associative", None, T) for T in (1, 2, 5)]
    return [pytest.param(*c, id=f"{c[0]}-{c[1]}-C{c[2]}-T{c[3]}") for c in cases]


@pytest.mark.parametrize(("variant", "implementation", "chunk_size", "T"), _edges())
def test_edge_lengths(variant: str, implementation: str, chunk_size: int | None, T: int) -> None:
    inputs = layer_like(variant, Shape(2, T, 1, 6, 10))
    assert_matches(run(inputs, implementation, chunk_size=chunk_size), expected(inputs))


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("chunk_size", [1, 7, 24, 100])
def test_chunk_sizes_that_are_not_powers_of_two(implementation: str, chunk_size: int) -> None:
    """100 is above T = 50 and above one block of 16 rows; 7 and 24 do not divide 50."""
    inputs = weak_decay("kda", Shape(1, 50, 2, 6, 10))
    got = run(inputs, implementation, chunk_size=chunk_size)
    assert_matches(got, expected(inputs))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("T", [2 * PAIRS_FROM - 1, 2 * PAIRS_FROM, 2 * PAIRS_FROM + 1])
def test_a_state_for_every_second_chunk(variant: str, T: int) -> None:
    """Single chunks, pairs of them, and pairs the last of which is padded by more than a chunk."""
    inputs = layer_like(variant, Shape(1, T, 2, 6, 4))
    got = run(inputs, "chunkwise_solve", chunk_size=2)
    assert_matches(got, expected(inputs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens_return_the_initial_state(implementation: str) -> None:
    inputs = layer_like("kda", Shape(2, 0, 2, 4, 6))
    inputs["v"] = jnp.asarray(inputs["v"], jnp.bfloat16)
    o, state = linear_attention(**inputs, **IMPLEMENTATIONS[implementation])
    assert o.shape == (2, 0, 2, 6)
    assert o.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    np.testing.assert_array_equal(state, inputs["initial_state"])


def test_no_tokens_and_no_initial_state_return_zeros() -> None:
    inputs = layer_like("delta", Shape(2, 0, 2, 4, 6))
    del inputs["initial_state"]
    _, state = linear_attention(**inputs, segment_ids=np.zeros((2, 0), np.int32))
    np.testing.assert_array_equal(state, np.zeros((2, 2, 4, 6)))


def test_an_empty_batch_is_legal() -> None:
    inputs = layer_like("delta", Shape(0, 20, 2, 4, 6))
    o, state = linear_attention(**inputs, implementation="chunkwise")
    assert o.shape == (0, 20, 2, 6)
    assert state.shape == (0, 2, 4, 6)
