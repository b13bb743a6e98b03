"""`python -m experiments`: malformed inputs end in one line and status 1."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.command_line import main
from experiments.recall import Recall
from experiments.record import Run
from experiments.tasks.corpus import write_corpus

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 10**6) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
TRAINED = ("recall", "needle", "state-tracking", "associative-retrieval", "language-model")


def refused(*arguments) -> str:
    """Return the line that a command answers with; it must be one."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        status = main([str(x) for x in arguments])
    assert status == 1
    assert err.getvalue().startswith("error: ")
    assert err.getvalue().count("\n") == 1
    return err.getvalue()


def record_is_refused(experiment, config: bytes, rows: bytes = b"") -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_bytes(config)
        Path(folder, "metrics.jsonl").write_bytes(rows)
        refused(experiment, "--resume", folder)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with Run.start("recall", Recall(), tmp_path_factory.mktemp("run")) as record:
        return json.loads((record.directory / "config.json").read_text())


wrong = st.dictionaries(
    st.sampled_from(["steps", "rates", "memories", "seeds", "preset", "pairs", "length"]),
    st.one_of(st.booleans(), st.just([[]]), st.just({}), st.just("x"), st.just(-1.5)),
    min_size=1,
)


@example("recall", b"[]")
@example("scan-vs-chunk", b"[" * 10**5)
@given(st.sampled_from([*TRAINED, "scan-vs-chunk"]),
       st.binary(max_size=20) | VALUES.map(lambda x: json.dumps(x).encode()))  # fmt: skip
@settings(max_examples=100)
def test_bytes_of_a_config(experiment, data):
    record_is_refused(experiment, data)


@given(wrong)
@settings(max_examples=100)
def test_options_of_a_config(config, change):
    changed = config | {"options": config["options"] | change}
    record_is_refused("recall", json.dumps(changed).encode())


@example(b"[]\n")
@given(st.binary(min_size=1, max_size=10).filter(lambda x: x.strip() and b"\n" not in x))
@settings(max_examples=100)
def test_rows_of_a_record(config, row):
    record_is_refused("recall", json.dumps(config).encode(), row + b"\n")


@given(st.sampled_from(["corpus.json", "ends.bin", "tokens.bin"]), st.binary(max_size=30))
@settings(max_examples=100)
def test_files_of_a_corpus(name, data):
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), [[1, 2, 3]] * 20)
        Path(folder, name).write_bytes(data)
        assert folder in refused("train-sharded", "--corpus", folder, "--tokens", "8")


@pytest.mark.parametrize(
    "words",
    [
        ["train-sharded", "--corpus", "/nowhere"],
        ["train-sharded", "--data", "100"],
        ["train-sharded", "--implementation", "none"],
        ["train-sharded", "--vocab-size", "0"],
        ["pack-text", "--out", "/dev/null/x"],
        ["pack-text", "--out", "OUT", "--files", "/nowhere"],
        ["serving", "--slots", "0", "--results", "OUT"],
        ["serving", "--contexts", "-5", "--results", "OUT"],
        ["recall", "--steps", "0", "--results", "OUT"],
        ["recall", "--results", "/dev/null"],
        ["recall", "--seeds", "0", "--results", "OUT"],
        ["recall", "--rates", "nan", "--results", "OUT"],
        ["recall", "--block", "0", "--results", "OUT"],
        ["memory-capacity", "--results", "/dev/null"],
        ["memory-capacity", "--head-dims", "0", "--results", "OUT"],
        ["cache-size", "--head-dims", "-1", "--results", "OUT"],
        ["scan-vs-chunk", "--lengths", "0", "--results", "OUT"],
        ["recall", "--minutes", "inf", "--results", "OUT"],
        ["language-model", "--text", "/nowhere", "--results", "OUT"],
        ["scan-vs-chunk", "--text", "/nowhere", "--no-operators", "--results", "OUT"],
    ],
    ids=" ".join,
)
def test_options_that_cannot_be(tmp_path, words):
    refused(*(str(tmp_path / "out") if word == "OUT" else word for word in words))


def test_without_the_extra_it_says_what_to_install():
    code = (
        "import runpy, sys; sys.modules['tyro'] = None; sys.argv = ['experiments', '--help'];"
        "runpy.run_module('experiments', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: `python -m experiments` needs tyro; run pip install")
    assert done.stderr.count("\n") == 1
