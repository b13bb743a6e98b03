"""Malformed directories: every one is converted, or refused in words with status 1."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltanet_jax.convert import load_fla, load_qwen3_next
from deltanet_jax.convert.__main__ import main
from deltanet_jax.convert.files import CONFIG, INDEX, SINGLE
from deltanet_jax.convert.fla_config import config_from_fla
from deltanet_jax.models import DeltaNetConfig
from deltanet_jax.models.checkpoint import Checkpoints
from tests.convert.directories import CONFIGS, random_tensors, write

NUMBERS = st.sampled_from([0, -1, 1, 2, 1.5, 1e308, 10**9, 10**18, 10**400, float("inf")])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KEYS = [
    *sorted({key for config in CONFIGS.values() for key in config}),
    *("num_v_heads", "expand_k", "hidden_ratio", "use_short_conv", "tie_word_embeddings"),
    *("qk_norm", "attn", "layer_types", "full_attention_interval", "text_config", "unknown"),
]
DEEP = b'{"model_type": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("directories")
    return {kind: write(root / kind, CONFIGS[kind], random_tensors(kind)) for kind in CONFIGS}


def answer(*arguments) -> tuple[int, str]:
    """Status and message of the command line; every error but an expected one is raised."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(x) for x in arguments])
    first, *more = err.getvalue().splitlines() or [""]
    assert (status, first.startswith("error: ")) in ((0, False), (1, True))
    assert all(line.startswith("  - ") for line in more)
    return status, err.getvalue()


def config_is_answered(directory, config: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        (source / SINGLE).symlink_to(directory / SINGLE)
        (source / CONFIG).write_bytes(config)
        answer("check", source)


changes = st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2)


@example("delta_net", {"model_type": ["delta_net"]})
@example("delta_net", {"num_hidden_layers": 10**9})
@example("delta_net", {"hidden_size": float("inf")})
@example("delta_net", {"expand_v": 1e308})
@example("gated_deltanet", {"expand_v": 1e308})
@example("gated_deltanet", {"num_heads": 0})
@example("gated_deltanet", {"num_v_heads": 2**30, "num_heads": 2**30, "head_dim": 2**31 - 1})
@example("qwen3_next", {"linear_key_head_dim": 0})
@example("qwen3_next", {"num_hidden_layers": 10**9})
@given(st.sampled_from(list(CONFIGS)), changes)
@settings(max_examples=40)
def test_values_of_a_config(directories, kind, change):
    config = json.dumps(CONFIGS[kind] | change)
    config_is_answered(directories[kind], config.encode())


@given(st.sampled_from(["delta_net", "gated_deltanet"]), changes)
@settings(max_examples=400)
def test_a_config_is_ours_or_has_a_problem(kind, change):
    config, problems = config_from_fla(CONFIGS[kind] | change, "float32", None)
    assert isinstance(config, DeltaNetConfig) or problems
    assert all(isinstance(problem, str) and len(problem) < 600 for problem in problems)


@pytest.mark.slow
@given(st.sampled_from(list(CONFIGS)), changes)
@settings(max_examples=3000)
def test_many_values_of_a_config(directories, kind, change):
    config = json.dumps(CONFIGS[kind] | change)
    config_is_answered(directories[kind], config.encode())


@example(DEEP)
@example(b"[1]")
@given(st.binary(max_size=20) | VALUES.map(lambda x: json.dumps(x).encode()))
@settings(max_examples=100)
def test_bytes_of_a_config(directories, config):
    config_is_answered(directories["delta_net"], config)


@example({"weight_map": {"lm_head.weight": 3}})
@given(VALUES | st.fixed_dictionaries({"weight_map": VALUES}))
@settings(max_examples=100)
def test_values_of_an_index(directories, index):
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder) / "x", CONFIGS["delta_net"], {})
        (source / INDEX).write_text(json.dumps(index))
        assert answer("check", source)[0] == 1


@given(st.integers(0, 400), st.binary(min_size=1, max_size=3))
@settings(max_examples=100)
def test_bytes_of_the_tensors(directories, start, change):
    whole = (directories["delta_net"] / SINGLE).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder) / "x", CONFIGS["delta_net"], {})
        (source / SINGLE).write_bytes(whole[:start] + change + whole[start + len(change) :])
        answer("check", source)
        (source / SINGLE).write_bytes(whole[:start])
        assert answer("check", source)[0] == 1


@pytest.mark.parametrize(
    "options",
    [["--step", "-1"], ["--step", "7"], ["--dtype", "int32"], ["--max-shard-bytes", "0"]],
    ids=" ".join,
)
def test_options_of_an_export(directories, tmp_path, options):
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(0, load_fla(directories["delta_net"]))
    status, message = answer("export", tmp_path / "run", tmp_path / "out", *options)
    assert status == 1
    assert options[0].strip("-").replace("-", "_") in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_full_disk_is_noticed_before(directories, tmp_path, monkeypatch, command):
    source = directories["delta_net"]
    if command == "export":
        assert answer("import", source, tmp_path / "run")[0] == 0
        source = tmp_path / "run"
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    status, message = answer(command, source, tmp_path / "out")
    assert status == 1
    assert "the disk has 1,000" in message
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_fills_up(directories, tmp_path):
    """A limit on the size of files stands in for it."""
    assert answer("import", directories["delta_net"], tmp_path / "run")[0] == 0
    before = sorted(tmp_path.iterdir())
    words = ["-m", "deltanet_jax.convert", "export", tmp_path / "run", tmp_path / "out"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 3; exec "$@"', "bash", sys.executable, *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.fullmatch(r"error: .* cannot be written: .*\n", done.stderr)
    assert sorted(tmp_path.iterdir()) == before


def test_a_part_of_another_model_is_pointed_at(tmp_path):
    config = {"model_type": "qwen3_5", "text_config": CONFIGS["qwen3_next"]}
    source = write(tmp_path / "x", config, random_tensors("qwen3_next"))
    for call in (lambda: load_qwen3_next(source), lambda: load_fla(source)):
        with pytest.raises(ValueError, match=r"`model_type`.*got 'qwen3_5'.*`text_config`: 'qwen"):
            call()
    assert "`text_config`" in answer("check", source)[1]
