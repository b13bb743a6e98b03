"""Requests that share a batch get what each would get alone."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deltanet_jax.models import DeltaNetConfig, DeltaNetLM, Server, generate

CONFIG = DeltaNetConfig(
    vocab_size=17, hidden_size=8, num_layers=2, num_heads=2, gate="scalar", mlp_size=8
)


@pytest.fixture(scope="module")
def model():
    return DeltaNetLM(CONFIG, implementation="recurrent", rngs=nnx.Rngs(0))


def test_requests_of_different_lengths_equal_each_alone(model):
    """Five requests over two slots that start full of NaN."""
    server = Server(model, 2, prefill=4)
    server._cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), server._cache)
    rng = np.random.default_rng(0)
    lengths = [(1, 3), (9, 1), (4, 5), (2, 2), (5, 4)]
    requests = [server.submit(rng.integers(0, 17, n), out) for n, out in lengths]
    before = [x.shape for x in jax.tree.leaves(server._cache)]
    server.run()
    assert [x.shape for x in jax.tree.leaves(server._cache)] == before
    longest = max(n for n, _ in lengths)
    prompts = np.stack([np.pad(r.prompt, (longest - len(r.prompt), 0)) for r in requests])
    mask = np.stack([np.arange(longest) >= longest - n for n, _ in lengths])
    alone = generate(
        model, jnp.asarray(prompts), 5, key=jax.random.key(0), temperature=0.0, mask=mask
    )
    for request, row in zip(requests, np.asarray(alone), strict=True):
        assert request.tokens == row[: request.num_tokens].tolist()


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_step_that_was_interrupted_is_made_again(model, step):
    """Neither a token nor the reset of a slot is lost."""
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
    results = []
    for broken in (False, True):
        server = Server(model, 2, prefill=2)
        requests = [server.submit(prompt, 3) for prompt in prompts]
        advance, calls = server._advance, iter(range(1000))

        def interrupted(*arguments, advance=advance, calls=calls, broken=broken):
            if next(calls) == step and broken:
                raise KeyboardInterrupt
            return advance(*arguments)

        server._advance = interrupted
        if broken:
            with pytest.raises(KeyboardInterrupt):
                server.run()
        server.run()
        results.append([request.tokens for request in requests])
    assert results[0] == results[1]


def test_requests_are_compared_by_identity(model):
    server = Server(model, 1)
    first, second = (server.submit([1, 2], 1) for _ in range(2))
    assert first != second
    assert len({first, second}) == 2


def test_cancelled_requests_leave_and_others_go_on(model):
    server, alone = (Server(model, 1, prefill=2) for _ in range(2))
    wanted = alone.submit([7, 8], 4)
    alone.run()
    running, waiting, other = (server.submit(prompt, 4) for prompt in ([1, 2, 3], [4], [7, 8]))
    for _ in range(3):
        server.step()
    sampled = list(running.tokens)
    assert sampled
    assert server.cancel(running)
    assert server.cancel(waiting)
    server.run()
    assert (running.tokens, waiting.tokens, other.tokens) == (sampled, [], wanted.tokens)
    assert not any(server.cancel(request) for request in (running, waiting, other))


def test_logits_that_are_not_finite_name_their_request(model):
    poisoned = nnx.clone(model)
    poisoned.embedding[...] = model.embedding[...].at[5].set(jnp.nan)
    alone, server = Server(model, 1), Server(poisoned, 2)
    wanted = alone.submit([1, 2], 3)
    alone.run()
    good, bad = server.submit([1, 2], 3), server.submit([4, 5], 3)
    with pytest.raises(FloatingPointError, match=r"request 1 \(prompt of 2, 0 sampled\)"):
        server.run()
    server.run()
    assert (good.tokens, bad.tokens) == (wanted.tokens, [])


def test_a_model_that_learns_does_not_change_what_runs(model):
    learner = nnx.clone(model)
    results = []
    for change in (False, True):
        server = Server(learner, 1)
        request = server.submit([1, 2, 3], 4)
        server.step()
        if change:
            for variable in jax.tree.leaves(nnx.state(learner), is_leaf=is_variable):
                variable[...] = variable[...] + 1.0
        server.run()
        results.append(request.tokens)
    assert results[0] == results[1]


def is_variable(x):
    return isinstance(x, nnx.Variable)


def test_threads_submit_while_one_runs(model):
    """Every request gets what it gets alone, whichever thread brought it."""
    alone, server = (Server(model, 2, prefill=2) for _ in range(2))
    wanted = [alone.submit([i], 5) for i in range(12)]
    alone.run()
    got = {}

    def submit(numbers):
        for i in numbers:
            got[i] = server.submit([i], 5)

    threads = [threading.Thread(target=submit, args=(range(n, 12, 3),)) for n in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or server.busy:
        server.step()
    assert [got[i].tokens for i in range(12)] == [request.tokens for request in wanted]


def test_wrong_requests_are_named(model):
    server = Server(model, 1)
    with pytest.raises(ValueError, match="`prompt` must be integers"):
        server.submit([], 1)
    with pytest.raises(ValueError, match=r"tokens in \[0, 17\); got 3 to 17"):
        server.submit([3, 17], 1)
    with pytest.raises(ValueError, match="`num_tokens` must be a positive"):
        server.submit([3], 0)
    with pytest.raises(ValueError, match="`key` is required"):
        Server(model, 1, temperature=1.0)
    assert server.step() == []
