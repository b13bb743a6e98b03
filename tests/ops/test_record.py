"""A new per-token field of the record goes everywhere that tokens go, or is refused by name."""

import dataclasses
from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deltanet_jax import linear_attention, parallel
from deltanet_jax.core.problem import Problem, Tokens, decay_with_resets, start_state, tokens_of
from deltanet_jax.core.step import step
from deltanet_jax.kernels import mosaic_gpu, mosaic_tpu
from deltanet_jax.ops import canonical, dispatch
from deltanet_jax.ops.layout import as_chunks, each_chunk, from_chunks
from deltanet_jax.ops.maps import sequence_map
from tests.cases import PORTABLE, Inputs, Shape, layer_like

SHAPE = Shape(2, 37, 2, 4, 6)


class Marked(namedtuple("Marked", (*Tokens._fields, "mark")), Tokens):
    """`Tokens` with one field more, of the axes of `v`."""


def marked(problem: Problem) -> Problem:
    tokens = Marked(*problem.tokens, mark=2 * problem.v + 1)
    return dataclasses.replace(problem, tokens=tokens)


def read_mark(problem: Problem, chunk_size: int | None) -> tuple[jax.Array, jax.Array]:
    """An implementation whose outputs are the marks of the tokens."""
    return problem.tokens.mark, start_state(problem)


@pytest.fixture
def door(monkeypatch) -> None:
    """Every call gets a mark where its arguments are checked."""
    check = canonical.canonical_problem
    monkeypatch.setattr(canonical, "canonical_problem", lambda *a, **k: marked(check(*a, **k)))


def inputs(**sizes: int) -> Inputs:
    return layer_like("kda", SHAPE._replace(**sizes))


run = partial(linear_attention, implementation=read_mark)


@pytest.mark.usefixtures("door")
@pytest.mark.parametrize("ids", [None, np.repeat([[0, 1]], [20, 17], axis=1).repeat(2, axis=0)])
def test_calls_and_segments_carry_it(ids):
    x = inputs()
    o, _ = run(**x, segment_ids=ids)
    np.testing.assert_array_equal(o, 2 * x["v"] + 1)


@pytest.mark.usefixtures("door")
def test_sequences_of_one_row_carry_it():
    x = inputs(B=1)
    del x["initial_state"]
    o, _ = run(**x, cu_seqlens=np.asarray([0, 5, 5, 30, 37]))
    np.testing.assert_array_equal(o, 2 * x["v"] + 1)


@pytest.mark.usefixtures("door")
def test_vmap_and_shard_map_carry_it():
    x = {name: jnp.asarray(value) for name, value in inputs().items()}
    o, _ = jax.vmap(lambda x: run(**x))(jax.tree.map(lambda y: jnp.stack([y, y]), x))
    np.testing.assert_array_equal(o[1], 2 * x["v"] + 1)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(lambda x: run(**x), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(split(x)[0], 2 * x["v"] + 1)


@pytest.mark.usefixtures("door")
def test_context_parallelism_carries_it():
    x = inputs(T=40)
    state = jnp.asarray(x.pop("initial_state"))
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))
    call = partial(parallel.linear_attention, axis_name="context", implementation=read_mark)
    tokens = P(None, "context")
    split = jax.shard_map(
        lambda x, s: call(**x, initial_state=s),
        mesh=mesh, in_specs=(tokens, P()), out_specs=(tokens, P()),
    )  # fmt: skip
    np.testing.assert_array_equal(split(x, state)[0], 2 * x["v"] + 1)


def problem(**sizes: int) -> Problem:
    x = {name: jnp.asarray(value) for name, value in inputs(**sizes).items()}
    state = x.pop("initial_state")
    return marked(Problem(Tokens(**x), state))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_meshes_carry_it(kind):
    p = problem()
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        place = lambda spec: lambda x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        tokens = jax.tree.map(place(P("data", None, "heads")), p.tokens)
        state = place(P("data", "heads"))(p.initial_state)
        sharded = dataclasses.replace(p, tokens=tokens, initial_state=state)
        o, _ = jax.jit(lambda p: dispatch.over_devices(lambda p: read_mark(p, None), p))(sharded)
    np.testing.assert_array_equal(o, p.tokens.mark)


def test_chunks_carry_it():
    p = problem(T=32)
    tokens = tokens_of(p)
    assert tokens.mark is p.tokens.mark
    np.testing.assert_array_equal(from_chunks(as_chunks(tokens, 8).mark), p.tokens.mark)
    chunks = [jnp.swapaxes(chunk.mark, 1, 2) for chunk in each_chunk(tokens, 8)]
    np.testing.assert_array_equal(jnp.concatenate(chunks, axis=1), p.tokens.mark)
    jax.tree.map(np.testing.assert_array_equal, sequence_map(p), sequence_map(_plain(p)))


def _plain(p: Problem) -> Problem:
    return dataclasses.replace(p, tokens=Tokens(*p.tokens[:5]))


@pytest.mark.parametrize("name", PORTABLE)
def test_forms_that_do_not_read_it_pass_it_by(name):
    algorithm = dispatch.IMPLEMENTATIONS[name].algorithm
    got, want = algorithm(problem(), 8), algorithm(_plain(problem()), 8)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_one_step_carries_it():
    p = problem()
    token = jax.tree.map(lambda x: x[:, 0], tokens_of(p))
    got, want = step(p.initial_state, token), step(p.initial_state, Tokens(*token[:5]))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    "why_not", [mosaic_gpu.why_not, mosaic_gpu.why_not_one_token, mosaic_tpu.why_not]
)
def test_kernels_refuse_it_by_name(why_not):
    assert "`mark`" in why_not(problem())
    assert "`mark`" not in str(why_not(_plain(problem())))


def test_keys_of_few_heads_are_repeated_with_it():
    p = problem()
    half = p.map_tokens(lambda x: x[:, :, :1] if x is p.q or x is p.k else x)
    few = half.with_tokens(mark=p.tokens.mark[:, :, :1])
    repeated = few.with_repeated_keys().tokens
    np.testing.assert_array_equal(repeated.mark[:, :, 1], p.tokens.mark[:, :, 0])
    assert repeated.q.shape == p.q.shape
    assert decay_with_resets(few) is not None
