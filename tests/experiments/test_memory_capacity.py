"""The claims of `memory-capacity`, no more and no less."""

import numpy as np
import pytest

from experiments.memory_capacity import MemoryCapacity, run


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    options = MemoryCapacity(
        head_dims=(16, 32), trials=64, rewrites=4, results=tmp_path_factory.mktemp("results")
    )
    return run(options)


def rows_of(record, kind, rule, d):
    return record.select(kind=kind, rule=rule, d=d)


@pytest.mark.parametrize("d", [16, 32])
def test_error_of_the_sum_is_the_load(record, d):
    rows = rows_of(record, "write-once", "sum", d)
    measured = np.asarray([row["error"] for row in rows])
    expected = np.asarray([(row["pairs"] - 1) / d for row in rows])
    np.testing.assert_allclose(measured, expected, rtol=0.06)
    # No cliff at n = d: the steps on both sides of it are alike.
    steps = np.diff(measured)
    at = [row["pairs"] for row in rows].index(d)
    assert abs(steps[at] - steps[at - 1]) < 0.3 * steps[at]


@pytest.mark.parametrize("d", [16, 32])
def test_delta_rule_has_the_lower_error_and_the_lower_accuracy(record, d):
    both = zip(
        rows_of(record, "write-once", "sum", d), rows_of(record, "write-once", "delta", d),
        strict=True,
    )  # fmt: skip
    for sums, delta in both:
        assert delta["error"] < sums["error"]
        assert delta["nearest_accuracy"] <= sums["nearest_accuracy"]
    assert delta["nearest_accuracy"] < sums["nearest_accuracy"] - 0.05


@pytest.mark.parametrize("d", [16, 32])
def test_delta_rule_reads_the_newest_pair_exactly_and_forgets_by_age(record, d):
    assert all(r["error_of_newest"] < 1e-25 for r in rows_of(record, "write-once", "delta", d))
    if d != 32:
        return
    ages = np.asarray(record.find(kind="age", rule="delta")["error_newest_first"])
    quarters = ages.reshape(8, -1).mean(1)
    assert np.all(np.diff(quarters[:5]) > 0)
    sums = np.asarray(record.find(kind="age", rule="sum")["error_newest_first"])
    assert abs(sums[: d // 2].mean() - sums[-d // 2 :].mean()) < 0.1 * sums.mean()


@pytest.mark.parametrize("d", [16, 32])
def test_orthonormal_keys_are_exact_once_and_only_the_delta_rule_overwrites(record, d):
    sums, delta = (rows_of(record, "rewrite", rule, d) for rule in ("sum", "delta"))
    assert sums[0]["worst_error"] < 1e-25
    assert all(row["worst_error"] < 1e-25 for row in delta)
    measured = [row["error"] for row in sums]
    np.testing.assert_allclose(measured[1:], [1, 2, 3, 4], rtol=0.1)


def test_leaves_table_and_figures(record):
    names = {path.name for path in record.directory.iterdir()}
    assert {"config.json", "metrics.jsonl", "table.csv"} <= names
    assert {"memory_capacity.png", "memory_capacity.pdf"} <= names
