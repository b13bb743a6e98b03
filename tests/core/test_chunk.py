"""The algebra of one chunk against the recurrence, form by form and part by part."""

import jax
import numpy as np
import pytest

from deltanet_jax.core.affine import apply
from deltanet_jax.core.chunk import chunk_map, prepare_wy, read, write
from deltanet_jax.core.chunk_solve import solve_chunk
from deltanet_jax.core.problem import Tokens
from deltanet_jax.core.reference import recurrence
from tests.cases import VARIANTS
from tests.core.chunks import chunk_of
from tests.tolerances import assert_close

HIGHEST = jax.lax.Precision.HIGHEST


def _case(variant: str, C: int) -> tuple[Tokens, jax.Array, np.ndarray, np.ndarray]:
    """A chunk, its incoming state, and the oracle's outputs (unscaled) and state."""
    inputs, chunk, incoming = chunk_of(variant, C)
    rest = {name: x for name, x in inputs.items() if name not in "qkv"}
    o, state = recurrence(inputs["q"], inputs["k"], inputs["v"], scale=1.0, **rest)
    return chunk, incoming, o[0].swapaxes(0, 1), state[0]


@pytest.mark.parametrize("form", ["wy", "solve"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("C", [1, 19])
def test_a_chunk_is_as_many_steps(C: int, variant: str, form: str) -> None:
    chunk, state, o, final = _case(variant, C)

    @jax.jit
    def run(chunk: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        if form == "solve" and chunk.beta is not None:
            return solve_chunk(chunk, state, HIGHEST)[::-1]
        if form == "wy":
            factors = prepare_wy(chunk, HIGHEST)
            writes = factors.writes(state, HIGHEST)
            final = factors.advance(state, writes, HIGHEST)
        else:
            writes = chunk.v
            final = write(chunk, state, writes, HIGHEST)
        return read(chunk, state, writes, HIGHEST), final

    got_o, got_state = run(chunk, state)
    assert_close("o", got_o, o, 5e-6)
    assert_close("state", got_state, final, 5e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_map_of_a_chunk_is_its_advance(variant: str) -> None:
    chunk, state, _, final = _case(variant, 19)
    map_ = jax.jit(lambda chunk: chunk_map(prepare_wy(chunk, HIGHEST), HIGHEST))(chunk)
    assert map_.A.shape[-1] == (6 if VARIANTS[variant].delta else 1)
    assert_close("state", apply(map_, state, HIGHEST), final, 2e-6)


@pytest.mark.parametrize("variant", ["delta", "gated_delta", "kda"])
def test_wy_factors_do_not_depend_on_values_or_queries(variant: str) -> None:
    chunk, *_ = _case(variant, 19)
    prepare = jax.jit(lambda chunk: prepare_wy(chunk, HIGHEST))
    base, moved = prepare(chunk), prepare(chunk._replace(v=2 * chunk.v, q=chunk.q + 1))
    np.testing.assert_array_equal(base.W, moved.W)
    assert_close("U", moved.U, 2 * np.asarray(base.U), 1e-6)
