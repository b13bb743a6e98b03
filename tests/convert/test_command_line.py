"""`python -m deltanet_jax.convert`: there and back, and errors that are one line of words."""

import subprocess
import sys

import chex
from flax import nnx

from deltanet_jax.convert import load_fla
from deltanet_jax.convert.__main__ import main
from deltanet_jax.models.checkpoint import Checkpoints
from deltanet_jax.models.training import make_optimizer
from tests.convert.directories import CONFIGS, assert_identical, random_tensors, read, write


def test_help_lists_the_commands():
    run = subprocess.run(
        [sys.executable, "-m", "deltanet_jax.convert", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(word in run.stdout for word in ("check", "import", "export"))


def test_without_safetensors_the_commands_say_what_to_install(tmp_path):
    source = write(tmp_path / "x", CONFIGS["delta_net"], random_tensors("delta_net"))
    code = (
        "import sys; sys.modules['safetensors'] = None; "
        "from deltanet_jax.convert.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    for arguments, status in ((["--help"], 0), (["check", str(source)], 1)):
        run = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True
        )
        assert run.returncode == status
    assert run.stderr.startswith("error: converting checkpoints needs safetensors: pip install")


def test_a_directory_goes_there_and_comes_back(tmp_path, capsys):
    tensors = random_tensors("gated_deltanet")
    source = str(write(tmp_path / "theirs", CONFIGS["gated_deltanet"], tensors))
    ours, back = str(tmp_path / "ours"), str(tmp_path / "back")
    assert main(["check", source]) == 0
    assert "Gated DeltaNet, 2 layers" in capsys.readouterr().out
    assert main(["import", source, ours]) == 0
    assert main(["export", ours, back, "--max-shard-bytes", "2000"]) == 0
    assert_identical(read(tmp_path / "back"), tensors)


def test_a_checkpoint_of_a_training_run_is_exported(tmp_path):
    source = write(tmp_path / "theirs", CONFIGS["delta_net"], random_tensors("delta_net"))
    model = load_fla(source)
    optimizer = make_optimizer(model, 1e-2, total_steps=4, warmup_steps=1)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(7, model, optimizer)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--step", "7"]) == 0
    chex.assert_trees_all_equal(
        nnx.to_pure_dict(nnx.state(load_fla(tmp_path / "out"))),
        nnx.to_pure_dict(nnx.state(model)),
    )


def test_mixers_of_qwen3_next_are_checked(tmp_path, capsys):
    source = write(tmp_path / "x", CONFIGS["qwen3_next"], random_tensors("qwen3_next"))
    assert main(["check", str(source)]) == 0
    assert "layers 0, 1, 2" in capsys.readouterr().out
    assert main(["check", str(source), "--ignore", "*"]) == 1
    assert "`--ignore` is for" in capsys.readouterr().err


def test_what_cannot_be_done_is_said_and_nothing_is_written(tmp_path, capsys):
    tensors = random_tensors("delta_net")
    del tensors["lm_head.weight"]
    source = write(tmp_path / "x", CONFIGS["delta_net"], tensors)
    for command in (
        ["import", str(source), str(tmp_path / "out")],
        ["export", str(tmp_path / "nothing"), str(tmp_path / "out")],
        ["export", str(source), str(tmp_path / "out")],
    ):
        before = sorted(tmp_path.rglob("*"))
        assert main(command) == 1
        assert capsys.readouterr().err.startswith("error: ")
        assert sorted(tmp_path.rglob("*")) == before
