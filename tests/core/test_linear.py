"""A linear map with its own transpose against the same map without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.core.linear import linear_map
from tests.cases import rng_for


def _function(given, x):
    """Linear in `x`, and in neither of its parts alone."""
    scale, matrix = given
    return {"a": jnp.sin(scale) * (x[0] @ matrix) + x[1], "b": scale * jnp.sum(x[1])}


def _reverse(given, ct):
    scale, matrix = given
    return jnp.sin(scale) * (ct["a"] @ matrix.T), ct["a"] + scale * ct["b"]


def _plain(scale, matrix, y, z):
    return _function((scale, matrix), (y, z))


def _mapped(scale, matrix, y, z):
    return linear_map(_function, _reverse, (scale, matrix), (y, z))


def _arguments(*batch):
    rng = rng_for("linear", *batch)
    shapes = (), (3, 4), (2, 3), (2, 4)
    return tuple(jnp.asarray(rng.standard_normal((*batch, *s)), jnp.float32) for s in shapes)


def _same(transform, *args):
    got, want = transform(_mapped)(*args), transform(_plain)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def _loss(f):
    return lambda *args: sum(jnp.sum(jnp.cos(x)) for x in jax.tree.leaves(f(*args)))


def _gradient(f):
    return jax.grad(_loss(f), argnums=range(4))


TRANSFORMS = {
    "value": lambda f: f,
    "jit": jax.jit,
    "jvp": lambda f: lambda *a: jax.jvp(f, a, a),
    "jvp of x": lambda f: lambda *a: jax.jvp(lambda *x: f(*a[:2], *x), a[2:], a[2:]),
    "one tangent": lambda f: lambda *a: jax.jvp(lambda z: f(*a[:3], z), a[3:], a[3:]),
    "gradient": _gradient,
    "gradient of one": lambda f: jax.grad(_loss(f), argnums=3),
    "jit of gradient": lambda f: jax.jit(_gradient(f)),
    "forward over reverse": lambda f: lambda *a: jax.jvp(_gradient(f), a, a),
    "reverse over reverse": lambda f: _gradient(lambda *a: _gradient(f)(*a)),
    "reverse over forward": lambda f: _gradient(lambda *a: jax.jvp(f, a, a)[1]),
    "jacobians": lambda f: jax.jacrev(jax.jacfwd(f, argnums=2), argnums=0),
    "checkpoint": lambda f: _gradient(jax.checkpoint(f)),
    "linear transpose": lambda f: (
        lambda *a: jax.linear_transpose(lambda y, z: f(*a[:2], y, z), *a[2:])(f(*a))
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_is_that_of_the_plain_map(name):
    _same(TRANSFORMS[name], *_arguments())


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (None, None, 0, 0), (0, None, None, 0),
                                  (None, 1, 2, None), (0, None, None, None)])  # fmt: skip
@pytest.mark.parametrize("name", ["value", "jvp", "gradient", "forward over reverse"])
def test_batches_of_any_of_its_arguments(axes, name):
    batched = _arguments(5)
    args = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(batched, axes, strict=True)
    ]
    _same(lambda f: jax.vmap(TRANSFORMS[name](f), in_axes=axes), *args)
    _same(lambda f: TRANSFORMS[name](jax.vmap(f, in_axes=axes)), *args)


def test_reverse_mode_runs_the_transpose_and_forward_mode_does_not():
    wrong = lambda given, ct: jax.tree.map(lambda x: 2 * x, _reverse(given, ct))  # noqa: E731
    f = lambda y, z: linear_map(_function, wrong, _arguments()[:2], (y, z))  # noqa: E731
    x = _arguments()[2:]
    out, pull = jax.vjp(f, *x)
    right = jax.vjp(lambda y, z: _plain(*_arguments()[:2], y, z), *x)[1](out)
    for got, want in zip(pull(out), right, strict=True):
        np.testing.assert_allclose(got, 2 * want, rtol=1e-5)
    _same(lambda f: lambda *a: jax.jvp(f, a, a), *_arguments())


def test_a_scan_over_it():
    def run(f):
        def loop(scale, matrix, y, z):
            step = lambda z, _: (jnp.tanh(f(scale, matrix, y, z)["a"]), f(scale, matrix, y, z)["b"])  # noqa: E731
            return jax.lax.scan(jax.checkpoint(step), z, None, length=3)

        return _gradient(loop)

    _same(run, *_arguments())
