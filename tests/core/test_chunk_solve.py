"""Form 1's written-out derivative against that of its equations in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.compat import enable_x64
from deltanet_jax.core.chunk_solve import solve_chunk
from deltanet_jax.core.problem import Tokens
from deltanet_jax.core.step import step
from tests.cases import VARIANTS, rng_for
from tests.core.chunks import chunk_of
from tests.tolerances import assert_close

HIGHEST = jax.lax.Precision.HIGHEST
DELTA = [name for name, variant in VARIANTS.items() if variant.delta]


def _steps(chunk: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The recurrence, token after token."""
    outputs = []
    for i in range(chunk.q.shape[-2]):
        o, state = step(state, jax.tree.map(lambda x: x[:, i], chunk))
        outputs.append(o)
    return state, jnp.stack(outputs, axis=1)


def _in_float64(function, *trees):
    with enable_x64():
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), trees)
        return jax.tree.map(np.asarray, jax.jit(function)(*wide))


@pytest.mark.parametrize("variant", DELTA)
@pytest.mark.parametrize("C", [1, 19, 40])
def test_derivatives_of_a_chunk(C: int, variant: str) -> None:
    inputs = chunk_of(variant, C)[1:]
    rng = rng_for("chunk", C, variant)
    like = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree
    )
    moved = like(inputs)
    mine = lambda *x: solve_chunk(*x, HIGHEST)  # noqa: E731
    weights = like(jax.eval_shape(mine, *inputs))

    def derivatives(function):
        def both(inputs, moved, weights):
            out, change = jax.jvp(function, inputs, moved)
            return out, change, jax.vjp(function, *inputs)[1](weights)

        return both

    got = jax.jit(derivatives(mine))(inputs, moved, weights)
    want = _in_float64(derivatives(_steps), inputs, moved, weights)
    named = jax.tree_util.tree_leaves_with_path(got)
    for (path, x), exact in zip(named, jax.tree.leaves(want), strict=True):
        assert_close(jax.tree_util.keystr(path), x, exact, 2e-5)


@pytest.mark.parametrize("variant", DELTA)
def test_second_derivatives_of_a_chunk(variant: str) -> None:
    """Forward over reverse, and reverse over reverse, which differentiates the transpose."""
    inputs = chunk_of(variant, 9)[1:]
    mine = lambda *x: solve_chunk(*x, HIGHEST)  # noqa: E731

    def second(function):
        loss = lambda x: sum(jnp.sum(jnp.sin(y)) for y in function(*x))  # noqa: E731
        slope = lambda x: sum(jnp.sum(y * y) for y in jax.tree.leaves(jax.grad(loss)(x)))  # noqa: E731
        return lambda x: (jax.jvp(jax.grad(loss), (x,), (x,))[1], jax.grad(slope)(x))

    got, want = jax.jit(second(mine))(inputs), _in_float64(second(_steps), inputs)
    named = jax.tree_util.tree_leaves_with_path(got)
    for (path, x), exact in zip(named, jax.tree.leaves(want), strict=True):
        assert_close(jax.tree_util.keystr(path), x, exact, 5e-5)
