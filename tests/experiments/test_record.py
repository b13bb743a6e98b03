"""A record is readable at any moment and can be continued."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import checkpoint
from experiments.recall import Recall
from experiments.record import RecordError, Run, read_rows
from experiments.saved_options import restore_options


@dataclass(frozen=True)
class Options:
    sizes: tuple[int, ...] = (1, 2)
    rate: float = 0.5


@pytest.fixture
def run(tmp_path):
    with Run.start("trial", Options(), tmp_path, "one") as record:
        yield record


def test_config_holds_options_versions_device_and_commit(run):
    config = json.loads((run.directory / "config.json").read_text())
    assert config["experiment"] == "trial"
    assert config["options"] == {"sizes": [1, 2], "rate": 0.5}
    environment = config["environment"]
    assert environment["packages"]["jax"]
    assert environment["platform"] == "cpu"
    assert environment["device"]
    assert {"git_commit", "git_dirty", "python", "device_count"} <= set(environment)


def test_a_row_is_on_disk_before_the_next_is_measured(run):
    run.write({"kind": "a", "x": np.float32(0.5), "n": np.int64(3)})
    assert read_rows(run.directory / "metrics.jsonl") == [{"kind": "a", "x": 0.5, "n": 3}]


def test_numbers_that_are_not_finite_stay_strict_json(run):
    run.write({"x": float("nan"), "y": [float("inf")]})
    line = (run.directory / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"x": "nan", "y": ["inf"]}


def test_a_line_torn_by_a_kill_is_dropped_and_the_run_goes_on(run):
    run.write({"kind": "a", "n": 1})
    path = run.directory / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "a", "n"')
    assert read_rows(path) == [{"kind": "a", "n": 1}]
    run.__exit__(None, None, None)
    with Run.resume("trial", run.directory) as again:
        again.write({"kind": "a", "n": 2})
        assert [row["n"] for row in again.select(kind="a")] == [1, 2]
    kinds = [row["kind"] for row in read_rows(path)]
    assert kinds == ["a", "resumed", "a"]


def test_the_newest_row_of_a_key_is_found(run):
    run.write({"kind": "a", "n": 1, "x": 1})
    run.write({"kind": "a", "n": 1, "x": 2})
    assert run.find(kind="a", n=1)["x"] == 2
    assert run.find(kind="a", n=2) is None


def test_table_has_the_columns_of_all_rows(run):
    path = run.write_table([{"a": 1}, {"a": 2, "b": "x"}])
    with path.open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "x"}]


def test_a_run_is_not_overwritten(run, tmp_path):
    with pytest.raises(RecordError, match="--resume"):
        Run.start("trial", Options(), tmp_path, "one")


def test_runs_of_one_second_get_their_own_directories(tmp_path):
    directories = set()
    for _ in range(3):
        with Run.start("trial", Options(), tmp_path) as record:
            directories.add(record.directory)
    assert len(directories) == 3


@pytest.mark.parametrize("name", ["a/b", "../b", ""])
def test_a_name_cannot_leave_the_results(tmp_path, name):
    with pytest.raises(RecordError):
        Run.start("trial", Options(), tmp_path, name)


def test_only_a_run_of_the_same_experiment_is_gone_on_with(run, tmp_path):
    with pytest.raises(RecordError, match="'trial'"):
        Run.resume("other", run.directory)
    with pytest.raises(RecordError, match=r"config\.json"):
        Run.resume("trial", tmp_path)


def test_two_do_not_continue_one_run(run):
    """The second is told who holds the directory; a process that ended holds it no more."""
    with pytest.raises(RecordError, match=rf"in use by process {os.getpid()} on "):
        Run.resume("trial", run.directory)
    code = (
        "import sys; from pathlib import Path; from experiments.record import Run, RecordError\n"
        "try: Run.resume('trial', Path(sys.argv[1]))\n"
        "except RecordError as error: sys.exit(str(error))"
    )
    words = [sys.executable, "-c", code, str(run.directory)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, f"process {os.getpid()} on" in done.stderr) == (1, True)
    run.__exit__(None, None, None)
    assert subprocess.run(words, check=False).returncode == 0
    with Run.resume("trial", run.directory) as again:
        assert [row["kind"] for row in again.rows] == ["resumed", "resumed"]


@pytest.mark.parametrize("text", ["[]", "3", "{", "[" * 10**5, "{}", '{"experiment": "trial"}'])
def test_a_damaged_config_is_said_in_a_line(run, text):
    (run.directory / "config.json").write_text(text)
    with pytest.raises(RecordError) as error:
        Run.resume("trial", run.directory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["[]", "{", "\x00"])
def test_damaged_rows_are_said_in_a_line_and_free_the_directory(run, line):
    run.__exit__(None, None, None)
    (run.directory / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(RecordError, match=r"metrics\.jsonl"):
        Run.resume("trial", run.directory)
    (run.directory / "metrics.jsonl").unlink()
    with Run.resume("trial", run.directory):
        pass


def test_a_damaged_state_is_said_in_a_line(tmp_path):
    path, state = tmp_path / "state.npz", {"a": jnp.ones((3, 2)), "b": jnp.zeros(())}
    checkpoint.save(path, state, 5)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"state\.npz is damaged"):
            checkpoint.load(path, state)
    path.write_bytes(whole)
    assert checkpoint.load(path, state)[1] == 5
    with pytest.raises(ValueError, match=r"holds an array \(3, 2\); wanted \(2,\)"):
        checkpoint.load(path, state | {"a": jnp.ones(2)})


CHANGED = [
    *({"steps": x} for x in (True, "7", None, 1.5, [1])),
    *({"rates": x} for x in (3, ["a"], [[1.0]], None)),
    *({"preset": "tpu"}, {"name": 3}, {"seeds": float("nan")}),
]


@pytest.mark.parametrize("change", CHANGED, ids=str)
def test_saved_options_have_their_types(change):
    options = Recall()
    saved = json.loads(json.dumps(dataclasses.asdict(options) | {"results": "x"}))
    assert restore_options(Recall, saved) == options
    with pytest.raises(RecordError, match=f"`{next(iter(change))}`"):
        restore_options(Recall, saved | change)
