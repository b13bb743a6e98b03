"""A tiny ablation from start to end, interrupted and resumed."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from deltanet_jax.models import DeltaNetLM
from experiments import command_line
from experiments.progress import progress_bar
from experiments.record import Run, read_rows
from experiments.saved_options import restore_options
from experiments.scan_vs_chunk import PRESETS, ScanVsChunk, main, operators, training
from experiments.scan_vs_chunk.costs import Sizes, predict
from experiments.scan_vs_chunk.operators import Case

TINY = ScanVsChunk(
    lengths=(32,), head_dim=8, head_dims=(8,), chunk_sizes=(64,), head_sweep_length=32,
    chunk_sweep_length=32, ratio_lengths=(32,), ratio_tokens=32, ratio_width=8, repeats=3,
    threads=2, optimization_level=1, steps=4, train_batch=2, train_length=32, width=16, layers=1,
    train_heads=1, checkpoint_every=2, text_bytes=20_000, large_arms=("chunkwise",),
    large_width=16, large_layers=1, large_heads=1, large_batch=2, large_length=32, large_steps=2,
)  # fmt: skip
FIRST_ARM, *_, LAST_ARM = training.ARMS


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    options = replace(TINY, results=tmp_path_factory.mktemp("results"), name="whole")
    assert main.run(options) == 0
    with Run.resume(main.EXPERIMENT, options.results / "scan-vs-chunk" / "whole") as record:
        return record


def test_every_case_is_measured_against_the_oracle_or_says_why_not(whole):
    rows = {Case(*(r[f] for f in Case._fields)): r for r in whole.select(kind="operator")}
    assert set(rows) == set(operators.cases(TINY))
    for case, row in rows.items():
        if case.implementation == "pallas":
            assert row["status"] == "not here"
            assert "cpu" in row["reason"]
            continue
        assert row["status"] == "measured"
        assert row["seconds_q25"] <= row["seconds"] <= row["seconds_q75"]
        assert row["compile_seconds"] > 0
        assert row["predicted_flops"] > 0
        names = ("error_output", "error_state") if case.direction == "forward" else (
            "error_gradient",)  # fmt: skip
        for name in names:
            assert row[name] < (1e-5 if case.direction == "forward" else 1e-4)


def test_losses_agree_step_by_step(whole):
    curves = training.losses(whole)
    assert list(curves) == list(training.ARMS)
    assert all(len(curve) == TINY.steps for curve in curves.values())
    assert all(row["agrees"] for row in training.agreement(whole, 1e-4))


def test_leaves_config_table_and_figures(whole):
    names = {path.name for path in whole.directory.iterdir()}
    assert {"config.json", "metrics.jsonl", "table.csv"} <= names
    for figure in ("against_length", "against_sizes", "ratio", "training"):
        assert {f"{figure}.png", f"{figure}.pdf"} <= names
    config = json.loads((whole.directory / "config.json").read_text())
    assert restore_options(main.ScanVsChunk, config["options"]) == replace(
        TINY, results=main.ScanVsChunk().results, name="whole"
    )


def test_interrupted_and_resumed_training_has_the_losses_of_the_unbroken_run(
    whole, tmp_path, monkeypatch, capsys
):
    options = replace(TINY, operators=False, large_arms=(), results=tmp_path, name="broken")
    write = Run.write

    def interrupt(record, row):
        written = write(record, row)
        if row.get("step") == 2:
            raise KeyboardInterrupt
        return written

    # One arm is enough for what is tested here, and compiles once more only.
    monkeypatch.setattr(training, "ARMS", {FIRST_ARM: training.ARMS[FIRST_ARM]})
    monkeypatch.setattr(main.drawing, "draw_all", lambda options, record: [])
    monkeypatch.setattr(Run, "write", interrupt)
    assert main.run(options) == 130
    directory = tmp_path / "scan-vs-chunk" / "broken"
    assert f"--resume {directory}" in capsys.readouterr().out.replace("\n", "")
    assert (directory / "table.csv").exists()
    before = read_rows(directory / "metrics.jsonl")
    assert before[-1]["step"] == 2

    monkeypatch.setattr(Run, "write", write)
    assert main.run(replace(ScanVsChunk(), resume=directory)) == 0
    after = read_rows(directory / "metrics.jsonl")
    trained = [(r["arm"], r["step"]) for r in after[len(before) :] if r["kind"] == "train"]
    assert trained == [(FIRST_ARM, 2), (FIRST_ARM, 3)]  # from the checkpoint after two steps
    with Run.resume(main.EXPERIMENT, directory) as record:
        curves = training.losses(record)
    np.testing.assert_array_equal(curves[FIRST_ARM], training.losses(whole)[FIRST_ARM])


def test_resume_measures_only_what_is_missing(whole, tmp_path, monkeypatch):
    directory = tmp_path / "half"
    directory.mkdir()
    kept = whole.select(kind="operator")[:5]
    options = json.loads((whole.directory / "config.json").read_text())
    options["options"] |= {"training": False, "threads": 0}
    (directory / "config.json").write_text(json.dumps(options))
    lines = "".join(json.dumps(row) + "\n" for row in kept)
    (directory / "metrics.jsonl").write_text(lines + '{"kind": "oper')
    measured = []

    def fake(options, case, budget, prepared):
        assert prepared is None
        measured.append(case)
        return whole.find(kind="operator", **case._asdict())

    monkeypatch.setattr(operators, "measure_case", fake)
    monkeypatch.setattr(main.drawing, "draw_all", lambda options, record: [])
    assert main.run(ScanVsChunk(resume=directory, operator_seconds=0.0)) == 0
    assert measured == []
    assert main.run(ScanVsChunk(resume=directory)) == 0
    assert measured == operators.cases(TINY)[5:]


def test_other_text_is_refused_on_resume(whole, tmp_path):
    with Run.start(main.EXPERIMENT, TINY, tmp_path, "x") as record:
        record.write({"kind": "text", "source": "?", "bytes": 1, "sha256": "0"})
        with pytest.raises(ValueError, match="text"):
            training.train(TINY, record, bar=None)


def test_losses_that_disagree_fail_the_run(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main.drawing, "draw_all", lambda options, record: [])
    with Run.start(main.EXPERIMENT, TINY, tmp_path, "x") as record:
        for row in whole.rows:
            off = row["kind"] == "train" and row["arm"] == LAST_ARM and row["step"] == 3
            record.write(row | {"loss": row["loss"] + 0.01} if off else row)
        assert main.finish(TINY, record) == 1
        worst = record.find(kind="agreement", arm=LAST_ARM)
    assert worst["at_step"] == 3
    assert not worst["agrees"]
    assert "differ by more than" in capsys.readouterr().out


def test_what_does_not_fit_is_listed_and_not_run(monkeypatch):
    monkeypatch.setattr(jax, "jit", pytest.fail)
    case = Case("associative", "forward+backward", 1, 2**20, 1, 128, None)
    row = operators.measure_case(ScanVsChunk(), case, budget=16e9)
    assert row["status"] == "does not fit"
    assert "GB" in row["reason"]


def test_a_call_of_the_ratio_sweep_has_one_number_of_tokens_and_channels():
    _, ratios, _ = operators.sweeps(PRESETS["gpu"])
    assert {case.B * case.T for case in ratios} == {16384}
    assert {case.H * case.d for case in ratios} == {2048}
    assert {case.d for case in ratios} == {64, 128, 256}


def test_no_operator_is_begun_after_its_time(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "measure_case", pytest.fail)
    with Run.start(main.EXPERIMENT, TINY, tmp_path, "x") as record, progress_bar() as bar:
        operators.measure(replace(TINY, operator_seconds=0.0), record, bar)
    assert not record.select(kind="operator")


def test_the_large_model_has_about_100_million_parameters_and_was_trained(whole):
    config = training.plans(PRESETS["gpu"])["large pallas"].config
    model = nnx.eval_shape(lambda: DeltaNetLM(config, rngs=nnx.Rngs(0)))
    assert 95e6 < sum(x.size for x in jax.tree.leaves(nnx.state(model))) < 105e6
    row = whole.find(kind="arm", arm="large chunkwise")
    assert row["tokens_per_second"] > 0
    assert row["last_loss"] < 6.5


@pytest.mark.parametrize(
    ("message", "status"), [("RESOURCE_EXHAUSTED: 1 TB", "does not fit"), ("INTERNAL", "failed")]
)
def test_a_case_that_the_device_refuses_is_a_row(monkeypatch, message, status):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(operators, "compile_ahead", refuse)
    row = operators.measure_case(TINY, operators.cases(TINY)[0], budget=1e9)
    assert (row["status"], row["reason"]) == (status, message)


def test_predicted_flops_and_memory_of_the_scan_over_tokens_are_the_compilers():
    options = replace(TINY, head_dim=16)
    arrays, _ = operators.inputs(options, 1, 256, 1, 16)
    call = lambda arrays: operators._forward(arrays, implementation="associative", C=None)  # noqa: E731
    compiled = jax.jit(call).lower(arrays).compile()
    cost = predict("associative", Sizes(1, 256, 1, 16, 16, 1), backward=False)
    # No loop in this form, so the compiler's count is the true one.
    assert compiled.cost_analysis()["flops"] == pytest.approx(cost.flops, rel=0.35)
    measured = compiled.memory_analysis().temp_size_in_bytes
    assert measured / 2 < cost.temporary_bytes < measured * 2


NEW_IMPLEMENTATION = """
from dataclasses import replace
from pathlib import Path
from deltanet_jax.ops import dispatch
from deltanet_jax.ops.chunkwise import chunkwise

def why_not(problem, chunk_size):
    return "it takes chunks of 64" if chunk_size != 64 else None

dispatch.IMPLEMENTATIONS["mine"] = dispatch.Row(chunkwise, why_not)

from experiments.record import Run
from experiments.scan_vs_chunk import main
from tests.experiments.test_scan_vs_chunk import TINY

options = replace(TINY, training=False, chunk_sizes=(16, 64), results=Path(RESULTS), name="new")
assert main.run(options) == 0
with Run.resume(main.EXPERIMENT, options.results / "scan-vs-chunk" / "new") as record:
    rows = record.select(kind="operator", implementation="mine")
assert {row["status"] for row in rows if row["C"] == 64} == {"measured"}
refused, = {(row["status"], row["reason"]) for row in rows if row["C"] == 16}
assert refused == ("not here", "it takes chunks of 64"), refused
"""


def test_a_new_implementation_is_measured_and_drawn_with_no_further_edit(tmp_path):
    code = f"RESULTS = {str(tmp_path)!r}\n" + NEW_IMPLEMENTATION
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_preset_sets_defaults_and_options_override_it():
    options = command_line.parse(["scan-vs-chunk", "--preset", "gpu", "--heads", "2"])
    assert options.preset == "gpu"
    assert options.heads == 2
    assert options.lengths[-1] == 131072
    assert command_line.parse(["scan-vs-chunk", "--preset=gpu"]).lengths[-1] == 131072
    assert command_line.parse(["scan-vs-chunk"]) == PRESETS["cpu"]


@pytest.mark.parametrize("name", ["scan-vs-chunk", "memory-capacity", "cache-size", "delta-as-sgd"])
def test_help_explains_every_option(name, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.parse([name, "--help"])
    assert stop.value.code == 0
    options = command_line.parse([name])
    out = capsys.readouterr().out
    for field in type(options).__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in out
    assert "(default" in out


def test_a_wrong_directory_is_an_error_and_not_a_traceback(tmp_path, capsys):
    assert command_line.main(["scan-vs-chunk", "--resume", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
