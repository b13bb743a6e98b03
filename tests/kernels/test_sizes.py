"""Head sizes of callers as those of the Hopper kernels, around a form that takes any size."""

import jax
import jax.numpy as jnp
import pytest

from deltanet_jax.core.problem import Problem, Tokens
from deltanet_jax.kernels.mosaic_gpu import sizes, support
from deltanet_jax.ops.chunkwise import chunkwise
from tests.cases import Shape, layer_like
from tests.checks import assert_matches, run
from tests.oracle import expected


def _widened(problem, chunk_size):
    return sizes.narrow(problem, *chunkwise(sizes.widen(problem), chunk_size))


@pytest.mark.parametrize(
    ("variant", "K", "V"),
    [
        ("delta", 1, 300),
        ("gated_delta", 96, 192),
        ("linear", 300, 1),
        ("kda", 100, 264),
        ("gla", 264, 130),
    ],
)
def test_rounded_and_parted_heads_are_exact(variant: str, K: int, V: int) -> None:
    inputs = layer_like(variant, Shape(1, 9, 4, K, V, 2))
    assert_matches(run(inputs, "chunkwise", implementation=_widened), expected(inputs))


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_every_size_is_held_or_refused_with_its_limit(gate: str, delta: bool) -> None:
    """Every residue of 8, and both sides of every size of the kernels."""
    grid = sorted({*range(1, 301, 7), *(n + i for n in (64, 128, 192, 256) for i in (-1, 0, 1))})
    limit = 128 if gate == "vector" else 256
    for K in grid:
        for V in (K, 301 - K):
            problem = _problem(K, V, gate, delta=delta)
            reason = support.why_not(problem)
            refused = delta and K not in range(limit + 1)
            if refused:
                assert reason is not None
                assert f"K of at most {limit}; got K={K}" in reason
                continue
            assert reason is None or "need jax" in reason
            wide = jax.eval_shape(sizes.widen, problem)
            assert wide.q.shape[-1] in sizes.HEAD_DIMS
            assert wide.v.shape[-1] in sizes.HEAD_DIMS
            assert max(wide.q.shape[-1], wide.v.shape[-1]) <= limit
            o, state = jax.eval_shape(_shapes_back, problem)
            assert o.shape == problem.v.shape
            assert state.shape == (2, 4, K, V)


def _shapes_back(problem):
    wide = sizes.widen(problem)
    heads, value_dim = wide.v.shape[2:]
    state = jnp.zeros((2, heads, wide.q.shape[-1], value_dim))
    return sizes.narrow(problem, wide.v, state)


def _problem(K: int, V: int, gate: str, *, delta: bool) -> Problem:
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((2, 3, *shape), dtype)

    gates = {"none": None, "scalar": array(4), "vector": array(4, K)}
    beta = array(4) if delta else None
    return Problem(Tokens(array(2, K), array(2, K), array(4, V), gates[gate], beta))
