"""Several value heads per key head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import linear_attention
from tests.cases import IMPLEMENTATIONS, Shape, layer_like, pairs
from tests.checks import assert_matches, run
from tests.oracle import Expected, expected

SHAPE = Shape(2, 35, 2, 6, 10, group=3)


@pytest.mark.parametrize(("variant", "implementation"), pairs(("linear", "kda")))
def test_grouped_heads_equal_repeated_keys(variant: str, implementation: str) -> None:
    """The oracle sees q and k repeated; their gradients are sums over the group."""
    inputs = layer_like(variant, SHAPE)
    wide = inputs | {n: np.repeat(inputs[n], 3, axis=2) for n in "qk"}
    want = expected(wide)
    summed = {n: want.gradients[n].reshape(2, 35, 2, 3, 6).sum(3) for n in "qk"}
    want = Expected(want.o, want.state, want.gradients | summed)
    assert_matches(run(inputs, implementation), want)


def test_a_group_is_consecutive_value_heads() -> None:
    """Silencing key head 1 silences value heads 3, 4 and 5, and no other."""
    inputs = layer_like("linear", SHAPE)
    del inputs["initial_state"]
    inputs["k"] = inputs["k"] * np.array([1, 0], np.float32)[:, None]
    o = run(inputs, "chunkwise").o
    assert np.all(np.asarray(o[:, :, 3:]) == 0)
    assert np.all(np.abs(np.asarray(o[:, :, :3])).max(axis=(0, 1, 3)) > 0.01)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_a_key_head_are_summed_in_float32(implementation: str) -> None:
    """In float16 that of either value head would overflow; their sum is 0."""
    one = jnp.ones((1, 1, 1, 1), jnp.float16)
    v = jnp.asarray([6e4, -6e4], jnp.float16).reshape(1, 1, 2, 1)

    def loss(k: jax.Array) -> jax.Array:
        _, state = linear_attention(one, k, v, **IMPLEMENTATIONS[implementation])
        return 2 * jnp.sum(state)

    assert jax.grad(loss)(one).item() == 0.0
