"""The task is what it says, the memories are what they are called, and recall is learned."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deltanet_jax.models import DeltaNetConfig
from experiments import recall
from experiments.command_line import main, parse
from experiments.models import MEMORIES, make_model, memory_floats
from experiments.recall import PRESETS, results
from experiments.record import Run
from experiments.tasks.recall import draw_recall, longest_list

TINY = replace(PRESETS["cpu"], seeds=1, memories=("delta",), pairs=(2, 4), length=16,
               vocab_size=16, batch_size=16)  # fmt: skip


def test_every_key_is_asked_for_once_and_its_value_is_the_target():
    counts = np.asarray([1, 3, 8, 8, 5])
    tokens, targets = map(np.asarray, draw_recall(jax.random.key(0), 40, 24, jnp.asarray(counts)))
    assert tokens.shape == targets.shape == (5, 40)
    for row, answers, count in zip(tokens, targets, counts, strict=True):
        keys, values = row[: 2 * count : 2], row[1 : 2 * count : 2]
        assert len(set(keys)) == len(set(values)) == count
        assert ((keys >= 1) & (keys < 12)).all()
        assert ((values >= 12) & (values < 24)).all()
        asked = np.flatnonzero(answers >= 0)
        assert (asked >= 2 * count).all()
        assert (asked % 2 == 0).all()
        assert sorted(row[asked]) == sorted(keys)
        memory = dict(zip(keys, values, strict=True))
        assert [memory[key] for key in row[asked]] == answers[asked].tolist()
        assert not row[2 * count :][answers[2 * count :] < 0].any()


def test_most_queries_come_soon_and_the_law_is_the_papers():
    """For one query, position `x` has a probability in proportion to `x^-0.99`."""
    counts = jnp.ones((4000,), jnp.int32)
    targets = np.asarray(draw_recall(jax.random.key(1), 18, 16, counts)[1])
    places = (targets.argmax(1) - 2) // 2
    found = np.bincount(places, minlength=8) / len(places)
    law = np.arange(1, 9.0) ** -0.99
    assert np.abs(found - law / law.sum()).max() < 0.03  # about four deviations


def test_the_longest_list_fills_a_sequence_or_takes_all_keys():
    assert longest_list(64, 64) == 16
    assert longest_list(64, 16) == 7
    tokens, targets = draw_recall(jax.random.key(2), 28, 16, jnp.asarray([7]))
    assert int((targets >= 0).sum()) == 7
    assert (np.sort(np.asarray(tokens)[0, 14::2]) == np.arange(1, 8)).all()


@pytest.mark.parametrize("memory", MEMORIES)
def test_only_a_sum_does_not_care_in_which_order_it_was_written(memory):
    config = DeltaNetConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1,
                            conv_size=None, mlp_size=8)  # fmt: skip
    model = make_model(config, memory, nnx.Rngs(0), mlp=False)
    ways = jnp.asarray([[1, 2, 3, 4, 5, 6], [3, 5, 1, 2, 4, 6]])
    first, second = np.asarray(model(ways))[:, -1]
    same = np.abs(first - second).max() < 1e-5 * np.abs(first).max()
    assert same == (memory == "linear")


def test_memories_are_counted():
    config = DeltaNetConfig(vocab_size=8, hidden_size=8, num_layers=3, num_heads=2)
    state = make_model(config, "linear", nnx.Rngs(0)).init_cache(1)
    floats = sum(cache.state.size for cache in state)
    assert {memory_floats(config, m, 10) for m in MEMORIES if m != "softmax"} == {floats}
    assert memory_floats(config, "softmax", 10) == 3 * 10 * 2 * 8


def test_a_few_seconds_of_training_teach_recall(tmp_path):
    options = replace(TINY, steps=400, results=tmp_path, name="claim")
    assert recall.run(options) == 0
    with Run.resume("recall", tmp_path / "recall" / "claim") as record:
        (lane,) = results(record)[16, "delta"]
    assert min(lane["accuracy"]) > 0.9  # a guess is right in one of eight cases
    names = {path.name for path in record.directory.iterdir()}
    assert {"config.json", "table.csv", "recall.png", "recall.pdf"} <= names


def test_the_command_line_takes_the_presets_and_refuses_what_does_not_fit(capsys):
    assert parse(["recall"]) == PRESETS["cpu"]
    assert parse(["recall", "--preset", "gpu"]) == PRESETS["gpu"]
    assert main(["recall", "--pairs", "17"]) == 1
    assert "`pairs` must be 1 to 16" in capsys.readouterr().err
    assert main(["recall", "--memories", "hebb"]) == 1
