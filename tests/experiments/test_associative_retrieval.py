"""The task is what it says, and a few seconds of training hold the claim."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import associative_retrieval
from experiments.associative_retrieval import PRESETS, RULES, Retriever, results
from experiments.command_line import main, parse
from experiments.record import Run
from experiments.tasks.pairs import draw_pairs


@pytest.mark.parametrize("rewriting", [False, True])
def test_answers_are_the_last_values_and_padding_is_not_real(rewriting):
    key, count, most = jax.random.key(0), 5, 8
    pairs = draw_pairs(key, 16, most, jnp.asarray(count), rewriting=jnp.asarray(rewriting))
    keys, values, real, answers = (np.asarray(x) for x in pairs)
    assert (real.sum(1) == (2 * count if rewriting else count)).all()
    for row in range(16):
        written = {k: v for k, v, r in zip(keys[row], values[row], real[row], strict=True) if r}
        assert [written.get(k, -1) for k in range(most)] == answers[row].tolist()
        assert set(written) <= set(range(count))
        assert set(written.values()) <= set(range(count))
        if not rewriting:
            assert len(written) == len(set(written.values())) == count


def test_the_delta_rule_beats_the_sum_where_keys_are_rewritten(tmp_path):
    rules = ("sum-l2", "delta-l2")
    options = replace(PRESETS["cpu"], rules=rules, counts=(8,), steps=400, seeds=2,
                      results=tmp_path, name="claim")  # fmt: skip
    assert associative_retrieval.run(options) == 0
    with Run.resume("associative-retrieval", tmp_path / "associative-retrieval/claim") as record:
        found = results(record)
    for total, delta in zip(found["sum-l2", 2, 8], found["delta-l2", 2, 8], strict=True):
        assert delta["accuracy"] > 0.95
        assert delta["accuracy"] > total["accuracy"] + 0.2
        assert delta["loss"] < total["loss"] / 4
    # Written once, keys that the memory can hold are no test of the rule.
    assert all(lane["accuracy"] > 0.95 for rule in rules for lane in found[rule, 1, 8])
    names = {path.name for path in record.directory.iterdir()}
    assert {"config.json", "table.csv", "associative_retrieval.png"} <= names


@pytest.mark.parametrize("name", RULES)
def test_every_rule_reads_one_pair_exactly(name):
    """One key that was written once: the memory of every rule gives back a multiple of it."""
    model = Retriever(RULES[name], 4, 8, rngs=nnx.Rngs(0))
    pairs = draw_pairs(jax.random.key(0), 3, 4, jnp.asarray(1), rewriting=jnp.asarray(False))
    reads = np.asarray(model(pairs))[:, 0]
    assert (np.abs(reads[:, 1:]) < 1e-6).all()
    assert (np.abs(reads[:, 0]) > 1e-6).all()


def test_the_command_line_takes_the_presets_defaults_and_refuses_an_unknown_rule(capsys):
    assert parse(["associative-retrieval"]) == PRESETS["cpu"]
    assert parse(["associative-retrieval", "--preset=gpu"]) == PRESETS["gpu"]
    assert main(["associative-retrieval", "--rules", "hebb"]) == 1
    assert "delta-l2" in capsys.readouterr().err
