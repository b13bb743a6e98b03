"""Trained models of a few seconds hold the claims, and a sweep survives being killed."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from experiments import checkpoint, state_tracking, sweep
from experiments.command_line import parse
from experiments.progress import progress_bar
from experiments.record import Run, read_rows
from experiments.state_tracking import PRESETS, StateTracking, make_case
from experiments.tasks.groups import GROUPS, group_words

TINY = StateTracking(seeds=2, steps=20, block=5, batch_size=4, length=8, test_length=16,
                     test_words=4, hidden_size=8, parity_arms=("delta02",),
                     permutation_arms=(), rates=(1e-2,))  # fmt: skip


def test_targets_are_the_running_products():
    words, products = group_words(jax.random.key(0), "parity", 5, 30)
    np.testing.assert_array_equal(np.cumsum(words, axis=1) % 2, products)
    words, products = (np.asarray(x) for x in group_words(jax.random.key(1), "S3", 5, 9, parts=2))
    np.testing.assert_array_equal(words[:, 1::2], words[:, ::2] + 6)
    assert (products[:, ::2] == -1).all()
    product = np.zeros(5, int)
    for i in range(9):
        product = GROUPS["S3"][product, words[:, 2 * i]]
        np.testing.assert_array_equal(products[:, 2 * i + 1], product)


def test_the_permutations_are_a_group_in_which_order_matters():
    table = GROUPS["S3"]
    np.testing.assert_array_equal(table[0], np.arange(6))
    np.testing.assert_array_equal(table[table], table[:, table])
    assert (table != table.T).any()


def test_parity_is_solved_with_beta_to_2_and_not_with_beta_to_1(tmp_path):
    options = replace(
        PRESETS["cpu"], seeds=1, rates=(1e-2,), steps=300, test_length=64, test_words=32
    )
    with Run.start("claim", options, tmp_path) as record, progress_bar() as bar:
        rows = [
            sweep.train(options, record, bar, make_case(options, "parity", arm))
            for arm in ("delta01", "delta02")
        ]
    below_one, below_two = (row["lanes"][0]["unseen"] for row in rows)
    assert below_two > 0.99
    assert below_one < 0.75


def losses(directory):
    return [
        (row["step"], row["loss"])
        for row in read_rows(directory / "metrics.jsonl")
        if row["kind"] == "train"
    ]


def test_a_killed_run_is_readable_and_goes_on_as_the_unbroken_one(tmp_path, monkeypatch):
    # Compiled once: what is tested is the record and the checkpoint.
    program = sweep._compile(TINY, make_case(TINY, "parity", "delta02"))
    monkeypatch.setattr(sweep, "_compile", lambda options, case: program)
    assert state_tracking.run(replace(TINY, results=tmp_path, name="whole")) == 0
    whole, broken = (tmp_path / "state-tracking" / name for name in ("whole", "broken"))
    save = checkpoint.save

    def die(path, state, step):
        if step == 15:
            raise SystemExit("killed")  # the row is written and the checkpoint is not
        save(path, state, step)

    monkeypatch.setattr(checkpoint, "save", die)
    with pytest.raises(SystemExit):
        state_tracking.run(replace(TINY, results=tmp_path, name="broken"))
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert losses(broken) == losses(whole)[:3]
    monkeypatch.setattr(checkpoint, "save", save)
    assert state_tracking.run(StateTracking(resume=broken)) == 0
    assert sorted(dict(losses(broken)).items()) == losses(whole)
    for name in ("config.json", "table.csv", "state_tracking.png", "state_tracking.pdf"):
        assert (broken / name).exists()


def test_an_unknown_arm_and_a_length_that_does_not_fit_are_refused():
    names = ({"parity_arms": ("delta3",)}, {"permutation_arms": ("delta02", "delta3")})
    for change in (*names, {"test_length": 20}, {"test_length": 8}):
        with pytest.raises(ValueError, match="arms|test_length"):
            state_tracking.cases(replace(TINY, **change))


def test_the_command_line_takes_the_presets_defaults():
    assert parse(["state-tracking"]) == PRESETS["cpu"]
    options = parse(["state-tracking", "--preset", "gpu", "--seeds", "5"])
    assert options == replace(PRESETS["gpu"], seeds=5)
