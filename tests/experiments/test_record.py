"""A record is readable at any moment and can be continued."""

import csv
import json
from dataclasses import dataclass

import numpy as np
import pytest

from experiments.record import RecordError, Run, read_rows


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
