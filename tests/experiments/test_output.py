"""Output that is not a terminal: whole numbers in 80 columns, and progress now and then."""

import io

import pytest
from rich.console import Console

from experiments import progress, tables
from experiments.sweep import spread

COLUMNS = ["fraction right", "floats", *(f"{n} pairs" for n in (8, 16, 32, 64, 96))]


@pytest.fixture
def log(monkeypatch):
    console = Console(file=io.StringIO(), width=80, highlight=False)
    monkeypatch.setattr(tables, "console", console)
    monkeypatch.setattr(progress, "console", console)
    return console


def test_no_number_is_broken_and_no_line_is_long(log):
    cell = spread([0.748, 0.812, 0.896])
    rows = [["Gated DeltaNet", 1024, *[cell] * 5], ["softmax", 4096, *[cell] * 5]]
    log.print(tables.make_table("64 channels", COLUMNS, rows))
    lines = log.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count(cell) for line in lines) == 10
    assert sum("softmax" in line for line in lines) == sum("64 channels" in line for line in lines)
    for name in COLUMNS:
        assert all(word in log.file.getvalue() for word in name.split())


def test_a_narrow_table_stays_one(log):
    log.print(tables.make_table("x", ["a", "b"], [["one", 1], ["two", None]]))
    assert log.file.getvalue().count("x ") == log.file.getvalue().count("one") == 1


def test_a_log_gets_a_line_at_most_every_half_minute(log, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.progress_bar() as bar:
        task = bar.add_task("train recall", total=100, note="compiling")
        for done in range(100):
            now[0] += 1
            bar.update(task, completed=done, note=f"loss {done}")
    lines = log.file.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["train recall"] * 4
    assert lines[1] == "train recall: 30 of 100  loss 30"
