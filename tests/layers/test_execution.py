"""A layer outside of `jit`: one compiled program, unless a part of it is somebody else's."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deltanet_jax import ChunkwiseDeltaNet

HIDDEN = 8


def make(**kwargs) -> ChunkwiseDeltaNet:
    return ChunkwiseDeltaNet(HIDDEN, 2, chunk_size=4, rngs=nnx.Rngs(0), **kwargs)


def inputs(T: int = 6) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (2, T, HIDDEN))


@pytest.fixture
def programs() -> Iterator[list[str]]:
    """Grows by one entry for every program that is compiled."""
    compiled: list[str] = []

    def listen(event: str, _: float, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("gate", ["none", "vector"])
def test_a_call_is_one_program(programs, gate):
    layer, x = make(gate=gate, use_output_gate=True), inputs()
    cache, mask = layer.init_cache(2), jnp.ones((2, 6), bool)
    for call in (
        lambda: layer(x),
        lambda: layer(x, mask=mask),
        lambda: layer.extend(x, cache),
    ):
        del programs[:]
        call()
        assert len(programs) == 1
        call()
        assert len(programs) == 1


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_the_program_gives_what_the_operations_give(gate):
    layer, x = make(gate=gate), inputs()
    y, cache = layer.extend(x, layer.init_cache(2))
    with jax.disable_jit():
        wanted, wanted_cache = layer._mix(x, layer.init_cache(2), None, None)
    np.testing.assert_allclose(y, wanted, atol=2e-6)
    for got, want in zip(cache, wanted_cache, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_new_parameters_are_read_at_every_call():
    layer, x = make(), inputs()
    y = layer(x)
    layer.o_proj.kernel[...] = 2 * layer.o_proj.kernel[...]
    np.testing.assert_allclose(layer(x), 2 * y, rtol=1e-5)


class Counting(nnx.Module):
    """A part that changes with every call, as a dropout does."""

    def __init__(self, inner: nnx.Linear) -> None:
        self.inner, self.calls = inner, nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.inner(x)


def test_a_part_that_changes_with_every_call_may():
    layer, x = make(), inputs()
    y = layer(x)
    layer.q_proj = Counting(layer.q_proj)
    for _ in range(2):
        np.testing.assert_allclose(layer(x), y, atol=2e-6)
    assert int(layer.q_proj.calls[...]) == 2
