"""The claims of `cache-size`."""

import pytest

from experiments.cache_size import CacheSize, run, state_bytes


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    options = CacheSize(
        head_dims=(16, 64), heads=2, longest=128, results=tmp_path_factory.mktemp("results")
    )
    return run(options)


@pytest.mark.parametrize("d", [16, 64])
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("state / float32 KV", lambda d: d / 2),
        ("state + normaliser / float32 KV", lambda d: (d + 1) / 2),
        ("state / bfloat16 KV", lambda d: d),
    ],
)
def test_crossover(record, d, what, expected):
    row = record.find(kind="crossover", what=what, d=d)
    assert row["tokens"] == expected(d)
    assert row["first_larger"] == int(expected(d)) + 1


@pytest.mark.parametrize("d", [16, 64])
def test_bytes_of_the_arrays(record, d):
    assert record.find(kind="state", what="state", d=d)["bytes"] == 2 * d * d * 4
    assert record.find(kind="state", what="state + normaliser", d=d)["bytes"] == 2 * d * (d + 1) * 4
    for row in record.select(kind="kv", d=d, dtype="bfloat16"):
        assert row["bytes"] == 2 * row["tokens"] * 2 * d * 2


def test_convolutions_add_their_last_inputs():
    sizes = state_bytes(heads=2, d=16, conv_size=4)
    assert sizes["state + convolutions"] - sizes["state"] == 3 * 3 * 2 * 16 * 4


def test_leaves_table_and_figures(record):
    names = {path.name for path in record.directory.iterdir()}
    assert {"table.csv", "cache_size.png", "cache_size.pdf"} <= names
