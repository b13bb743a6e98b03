"""The task is what it says, the preset learns it, and a run given minutes resumes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import needle, sweep
from experiments.command_line import main, parse
from experiments.needle import HAYSTACKS, PRESETS, make_case
from experiments.record import read_rows
from experiments.tasks.needle import MARK, PATTERN, draw_needles, followers

TINY = replace(PRESETS["cpu"], memories=("delta",), test_lengths=(8, 16), depths=3, vocab_size=8,
               hidden_size=8)  # fmt: skip
# What the preset trains, as far as one seed of one model needs to learn.
SHORT = replace(PRESETS["cpu"], seeds=1, steps=240, block=80, memories=("delta",),
                test_lengths=(16, 64), depths=3)  # fmt: skip


@pytest.mark.parametrize(
    ("length", "repeated", "marked"), [(5, True, True), (17, False, True), (40, True, False)]
)
def test_the_needle_is_where_it_should_be_and_the_question_is_last(length, repeated, marked):
    depth = jnp.asarray([0.0, 0.25, 0.5, 1.0])
    tokens, values = draw_needles(
        jax.random.key(length), 4, 40, 20, length=length, depth=depth, repeated=repeated,
        marked=marked,
    )  # fmt: skip
    starts = np.round(np.asarray(depth) * (length - 5)).astype(int)
    for row, value, start in zip(np.asarray(tokens), values, starts, strict=True):
        assert (row[length:] == MARK).all()
        row = row[:length].tolist()
        assert (row[start] == MARK) == (row[-2] == MARK) == marked
        assert row[start + 1] == row[-1]
        assert row[start + 2] == value
        # Nothing else is the mark or the key, the value neither.
        rest = row[:start] + row[start + 2 : -2]
        assert MARK not in rest
        assert row[-1] not in rest
        assert all(1 <= token < 20 for token in rest)


def test_a_pattern_repeats_and_random_tokens_do_not():
    repeated = jnp.asarray([[True], [False]])
    tokens, _ = draw_needles(
        jax.random.key(0), 2, 64, 20, length=64, depth=jnp.asarray(0.0), repeated=repeated,
        marked=False,
    )  # fmt: skip
    hay = np.asarray(tokens)[:, 3:-2]
    same = hay[:, PATTERN:] == hay[:, :-PATTERN]
    assert same[0].all()
    assert same[1].mean() < 0.3
    assert len(set(hay[1])) == 18  # all but the mark and the key


@pytest.mark.parametrize("memory", ["delta", "softmax"])
def test_one_program_reads_every_length_as_if_nothing_came_after(memory):
    case = make_case(TINY, memory)
    model, key = case.make(nnx.Rngs(0)), jax.random.key(3)
    for variant, haystack in enumerate(list(HAYSTACKS.values())[1:], start=1):
        found = case.measure(model, key, jnp.asarray(variant))["accuracy"]
        for i, length in enumerate(TINY.test_lengths):
            tokens, values = draw_needles(
                key, 8, 16, 8, length=length, depth=jnp.asarray(0.5), repeated=haystack.repeated,
                marked=haystack.marked,
            )  # fmt: skip
            answers = jnp.argmax(model(tokens[:, :length])[:, -1], axis=-1)
            assert found[i, 1] == jnp.mean(answers == values)


def test_followers_are_what_came_after_the_last_occurrence():
    tokens = np.asarray([[3, 1, 3, 2, 3, 3, 1], [4, 4, 4, 5, 4, 5, 6]])
    expected = [[-1, -1, 1, -1, 2, 3, 3], [-1, 4, 4, -1, 5, 4, -1]]
    np.testing.assert_array_equal(followers(jnp.asarray(tokens)), expected)


@pytest.fixture(scope="module")
def program():
    return sweep._compile(SHORT, make_case(SHORT, "delta"))


@pytest.fixture(scope="module")
def whole(program, tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "_compile", lambda options, case: program)
        assert needle.run(replace(SHORT, results=results, name="whole")) == 0
    return results / "needle" / "whole"


def test_the_preset_learns_to_find_the_needle_and_keeps_it_beyond_its_length(whole):
    (result,) = (row for row in read_rows(whole / "metrics.jsonl") if row["kind"] == "result")
    for lane in result["lanes"]:
        assert np.mean(lane["accuracy"], axis=1).min() > 0.9, lane


def losses(directory):
    return [(row["step"], row["loss"]) for row in read_rows(directory / "metrics.jsonl")
            if row["kind"] == "train"]  # fmt: skip


def test_a_run_that_was_out_of_time_goes_on_as_the_unbroken_one(
    whole, program, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sweep, "_compile", lambda options, case: program)
    broken = tmp_path / "needle" / "broken"
    asked = []

    def late(options, record):
        asked.append(options)
        return len(asked) > 4  # before the programs, before the case, and before two blocks

    in_time = sweep._late
    monkeypatch.setattr(sweep, "_late", late)
    assert needle.run(replace(SHORT, results=tmp_path, name="broken")) == 0
    assert "out of time" in capsys.readouterr().out
    assert losses(broken) == losses(whole)[:2]
    monkeypatch.setattr(sweep, "_late", in_time)
    assert needle.run(replace(SHORT, resume=broken)) == 0
    assert losses(broken) == losses(whole)
    assert (broken / "table.csv").read_bytes() == (whole / "table.csv").read_bytes()
    assert (broken / "needle.png").exists()


def test_no_time_at_all_is_no_training(tmp_path):
    assert needle.run(replace(TINY, results=tmp_path, name="none", minutes=0.0)) == 0
    assert read_rows(tmp_path / "needle" / "none" / "metrics.jsonl") == []


def test_the_command_line_takes_the_presets_and_refuses_what_does_not_fit(capsys):
    assert parse(["needle"]) == PRESETS["cpu"]
    assert parse(["needle", "--preset", "gpu"]) == PRESETS["gpu"]
    assert main(["needle", "--test-lengths", "64", "4"]) == 1
    assert "at least 5" in capsys.readouterr().err
    assert main(["needle", "--memories", "hebb"]) == 1
