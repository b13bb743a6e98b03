"""The claims of `delta-as-sgd`."""

import pytest

from experiments.delta_as_sgd import GATES, SIZES, DeltaAsSgd, run


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return run(DeltaAsSgd(head_dim=8, trials=16, results=tmp_path_factory.mktemp("results")))


@pytest.mark.parametrize("gate", GATES)
def test_the_step_is_decay_and_one_step_of_descent(record, gate):
    assert record.find(kind="step", gate=gate)["largest_relative_difference"] < 1e-14


def test_the_residual_shrinks_by_one_minus_beta_times_squared_length(record):
    rows = record.select(kind="residual")
    assert {row["key_length"] for row in rows} == {1.0, 2.0}
    assert max(row["largest_deviation"] for row in rows) < 1e-13
    (projected, *_) = (r for r in rows if abs(r["beta_times_squared_length"] - 1) < 1e-12)
    assert projected["ratio"] < 1e-13


@pytest.mark.parametrize("size", SIZES)
def test_stable_range_of_repeated_steps(record, size):
    rows = record.select(kind="repeated", beta_times_squared_length=size)
    ratio, expected = rows[-1]["ratio"], abs(1 - size) ** rows[-1]["steps"]
    assert ratio == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_leaves_table_and_figures(record):
    names = {path.name for path in record.directory.iterdir()}
    assert {"table.csv", "delta_as_sgd.png", "delta_as_sgd.pdf"} <= names
