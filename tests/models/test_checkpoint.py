"""Checkpoints: round trips, kills, resumes."""

import shutil
import subprocess
import sys
import textwrap

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from deltanet_jax.models.checkpoint import Checkpoints
from deltanet_jax.models.checksum import checksums
from deltanet_jax.models.training import make_optimizer, train_step

CONFIG = DeltaNetConfig(vocab_size=17, hidden_size=16, num_layers=1, num_heads=2, mlp_size=16)


def make(seed=0, config=CONFIG, implementation="chunkwise"):
    model = DeltaNetLM(config, implementation=implementation, rngs=nnx.Rngs(seed))
    return model, make_optimizer(model, 1e-2, total_steps=20, warmup_steps=2)


def state_of(model):
    return nnx.to_pure_dict(nnx.state(model))


def batch(step):
    return jax.random.randint(jax.random.key(step), (2, 12), 0, CONFIG.vocab_size)


def train(model, optimizer, steps):
    return [float(train_step(model, optimizer, batch(i))["loss"]) for i in steps]


def test_a_resumed_run_has_the_losses_of_an_unbroken_one(tmp_path):
    model, optimizer = make()
    unbroken = train(model, optimizer, range(6))
    model, optimizer = make()
    train(model, optimizer, range(3))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, model, optimizer)
    resumed, its_optimizer = make(seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        step = checkpoints.restore(resumed, its_optimizer)
    assert step == 3
    chex.assert_trees_all_equal(
        nnx.to_pure_dict(nnx.state(resumed)), nnx.to_pure_dict(nnx.state(model))
    )
    assert train(resumed, its_optimizer, range(3, 6)) == unbroken[3:]


def test_a_checkpoint_fits_another_implementation(tmp_path):
    model, _ = make()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, model)
        other, _ = make(seed=1, implementation="recurrent")
        checkpoints.restore(other)
    np.testing.assert_allclose(other(batch(0)), model(batch(0)), rtol=1e-4, atol=1e-5)


def test_only_the_newest_are_kept(tmp_path):
    model, optimizer = make()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, model, optimizer)
        assert checkpoints.latest_step() == 3
        with pytest.raises(FileNotFoundError, match="step 1"):
            checkpoints.restore(model, optimizer, step=1)
        with pytest.raises(ValueError, match="already"):
            checkpoints.save(3, model, optimizer)


def test_a_config_that_differs_is_refused_by_its_fields(tmp_path):
    model, _ = make()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, model)
        other, _ = make(
            config=DeltaNetConfig.from_dict(CONFIG.to_dict() | {"mlp_size": 32, "gate": "scalar"})
        )
        with pytest.raises(ValueError, match=r"gate is 'scalar'.*mlp_size is 32"):
            checkpoints.restore(other)
        assert checkpoints.load_config() == CONFIG


def test_an_empty_directory_says_so(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() is None
        with pytest.raises(FileNotFoundError, match="does not hold a checkpoint"):
            checkpoints.restore(make()[0])
    with pytest.raises(ValueError, match="`keep`"):
        Checkpoints(tmp_path, keep=0)


def test_a_kill_while_writing_leaves_the_last_complete_checkpoint(tmp_path):
    """The process dies at the moment the second checkpoint would get its final name."""
    script = f"""
        import os, pathlib
        from tests.models import test_checkpoint as t
        model, optimizer = t.make()
        checkpoints = t.Checkpoints({str(tmp_path)!r})
        checkpoints.save(1, model, optimizer)
        rename, die = os.rename, lambda *a, **k: os._exit(9)
        os.rename = os.replace = die
        pathlib.Path.rename = pathlib.Path.replace = die
        checkpoints.save(2, model, optimizer)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 9, done.stderr
    model, optimizer = make(seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        assert checkpoints.restore(model, optimizer) == 1
        checkpoints.save(2, model, optimizer)
        assert checkpoints.latest_step() == 2


def test_readers_leave_what_a_writer_is_writing(tmp_path):
    """Opening, asking and closing removes nothing; the first save of a writer cleans up."""
    model = DeltaNetLM(CONFIG, rngs=nnx.Rngs(0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model)
    unfinished = tmp_path / "2.orbax-checkpoint-tmp-7"
    unfinished.mkdir()
    with Checkpoints(tmp_path) as reader:
        assert reader.latest_step() == 1
        assert reader.load_config() == CONFIG
    assert unfinished.exists()
    with Checkpoints(tmp_path) as writer:
        writer.save(3, model)
    assert not unfinished.exists()


def test_a_torn_step_is_passed_over_with_a_warning(tmp_path):
    model = DeltaNetLM(CONFIG, rngs=nnx.Rngs(0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, model)
    (tmp_path / "3").mkdir()
    with Checkpoints(tmp_path) as checkpoints, pytest.warns(match=r"incomplete steps .* \[3\]"):
        assert checkpoints.restore(model) == 2


def test_a_flipped_bit_is_found_and_the_step_before_is_named(tmp_path):
    """A process of its own: orbax leaves coroutines, which warn in whatever test is next."""
    code = (
        "import pathlib, sys; from tests.models import test_checkpoint as t; "
        "t.flip_bits(pathlib.Path(sys.argv[1]))"
    )
    words = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def flip_bits(tmp_path):
    """In every file of a checkpoint: refused by its step, or nothing was read from there."""
    (model, optimizer), (other, its_optimizer) = make(), make(seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        for step in (4, 7):
            checkpoints.save(step, model, optimizer)
    wanted, untouched = state_of(model), state_of(other)
    files = sorted(path for path in (tmp_path / "7").rglob("*") if path.stat().st_size)
    rng, refused, largest = np.random.default_rng(0), 0, max(files, key=lambda p: p.stat().st_size)
    for path in [file for file in files if file.is_file()] + [largest] * 12:
        whole = path.read_bytes()
        broken = bytearray(whole)
        broken[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        with Checkpoints(tmp_path) as checkpoints:
            try:
                checkpoints.restore(other, its_optimizer)
            except ValueError as error:
                refused += 1
                said = "of step 7 in" in str(error) and "before is of step 4" in str(error)
                assert said or "`model.config` differs" in str(error), path  # noqa: PT017
                chex.assert_trees_all_equal(state_of(other), untouched)
            else:
                chex.assert_trees_all_equal(state_of(other), wanted)
                nnx.update(other, nnx.state(make(seed=1)[0]))
        path.write_bytes(whole)
    assert refused > 12
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(other, its_optimizer) == 7


def test_a_checkpoint_without_checksums_is_still_read(tmp_path):
    model, other = make()[0], make(seed=1)[0]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, model)
    shutil.rmtree(tmp_path / "4" / "checksums")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(other) == 4
    chex.assert_trees_all_equal(state_of(other), state_of(model))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.int32])
def test_a_checksum_sees_every_bit_and_no_sharding(dtype):
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(dtype)
    places = [P(), P("a"), P("b", None, "a"), P(("a", "b"))]
    found = {checksums({"x": jax.device_put(x, NamedSharding(mesh, p))})["['x']"] for p in places}
    assert len(found) == 1
    for bit in range(8 * x.nbytes):
        flipped = bytearray(x.tobytes())
        flipped[bit // 8] ^= 1 << bit % 8
        y = np.frombuffer(bytes(flipped), dtype).reshape(x.shape)
        assert checksums({"x": jnp.asarray(y)})["['x']"] not in found


@pytest.mark.parametrize("step", [-1, 1.5, True, "7"])
def test_a_step_is_a_whole_number(tmp_path, step):
    model = DeltaNetLM(CONFIG, rngs=nnx.Rngs(0))
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="`step` must be"):
        checkpoints.save(step, model)
