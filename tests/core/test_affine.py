"""Affine maps of the state: one operator, associative, earlier map first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.core.affine import AffineMap, apply, compose, token_maps
from deltanet_jax.core.reference import recurrence
from tests.cases import VARIANTS, Shape, layer_like, rng_for
from tests.tolerances import assert_close

HIGHEST = jax.lax.Precision.HIGHEST
K, V = 5, 3


def _map(seed: int, kind: str) -> AffineMap:
    rng = rng_for("map", seed)
    A = rng.standard_normal((2, K, K if kind == "matrix" else 1))
    return AffineMap(
        jnp.asarray(A, jnp.float32), jnp.asarray(rng.standard_normal((2, K, V)), jnp.float32)
    )


KINDS = pytest.mark.parametrize("kind", ["matrix", "diagonal"])


@KINDS
def test_composition_applies_the_earlier_map_first(kind: str) -> None:
    first, second = _map(1, kind), _map(2, kind)
    state = jnp.asarray(rng_for("state").standard_normal((2, K, V)), jnp.float32)
    both = apply(compose(first, second, HIGHEST), state, HIGHEST)
    assert_close("state", both, apply(second, apply(first, state, HIGHEST), HIGHEST), 1e-6)
    swapped = apply(compose(second, first, HIGHEST), state, HIGHEST)
    assert float(jnp.abs(swapped - both).max()) > 0.1


@KINDS
def test_composition_is_associative(kind: str) -> None:
    a, b, c = (_map(i, kind) for i in range(3))
    left = compose(compose(a, b, HIGHEST), c, HIGHEST)
    right = compose(a, compose(b, c, HIGHEST), HIGHEST)
    assert_close("A", left.A, right.A, 1e-6)
    assert_close("B", left.B, right.B, 1e-6)


@KINDS
def test_identity_map_is_neutral(kind: str) -> None:
    x = _map(1, kind)
    A = jnp.eye(K) if kind == "matrix" else jnp.ones((K, 1))
    identity = AffineMap(jnp.broadcast_to(A, x.A.shape), jnp.zeros_like(x.B))
    for composed in (compose(identity, x, HIGHEST), compose(x, identity, HIGHEST)):
        np.testing.assert_array_equal(composed.A, x.A)
        np.testing.assert_array_equal(composed.B, x.B)


@pytest.mark.parametrize("variant", VARIANTS)
def test_token_map_is_one_step_of_the_recurrence(variant: str) -> None:
    inputs = layer_like(variant, Shape(1, 1, 1, K, V))
    g, beta = inputs.get("g"), inputs.get("beta")
    gate = None if g is None else jnp.asarray(g.reshape(1, -1))
    got = apply(
        token_maps(
            jnp.asarray(inputs["k"][:, 0, 0]),
            jnp.asarray(inputs["v"][:, 0, 0]),
            gate,
            None if beta is None else jnp.asarray(beta[:, 0]),
        ),
        jnp.asarray(inputs["initial_state"][:, 0]),
        HIGHEST,
    )
    rest = {name: x for name, x in inputs.items() if name not in "qkv"}
    _, want = recurrence(inputs["q"], inputs["k"], inputs["v"], **rest)
    assert_close("state", got, want[:, 0], 1e-6)


def test_token_maps_of_unit_decay_reflect_along_the_key() -> None:
    """`I - 2 k^T k` is its own inverse: an eigenvalue of -1 along `k` and 1 elsewhere."""
    k = jnp.asarray([[0.6, 0.8]])
    A = token_maps(k, jnp.zeros((1, 1)), None, jnp.full((1, 1), 2.0)).A[0]
    np.testing.assert_allclose(A @ A, np.eye(2), atol=1e-6)
    np.testing.assert_allclose(k @ A, -k, atol=1e-6)
