"""One model over one mesh with data, FSDP, head and context axes, in one process or in several."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from deltanet_jax.models import DeltaNetConfig, DeltaNetLM
from deltanet_jax.models.checkpoint import Checkpoints
from deltanet_jax.models.sharding import check_mesh, make_mesh, make_sharded
from experiments.train_sharded import TrainSharded, run

OPTIONS = TrainSharded(
    steps=3,
    batch=4,
    tokens=16,
    hidden_size=8,
    num_heads=2,
    num_layers=1,
    vocab_size=16,
    implementation="recurrent",
)
# One optimiser step divides by the root of squared gradients: rounding is amplified there.
CLOSE = {"rtol": 2e-5}


@pytest.fixture(scope="module")
def losses() -> dict[int, float]:
    """Result of one device."""
    return run(OPTIONS)


def _values(losses: dict[int, float]) -> np.ndarray:
    return np.array([losses[step] for step in sorted(losses)])


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_a_mesh_of_all_axes_gives_the_losses_of_one_device(losses: dict, explicit: bool) -> None:
    sharded = run(replace(OPTIONS, fsdp=2, heads=2, context=2, explicit=explicit))
    np.testing.assert_allclose(_values(sharded), _values(losses), **CLOSE)


def test_parameters_are_made_in_parts() -> None:
    mesh = make_mesh(fsdp=2, heads=2, data=2)
    config = DeltaNetConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2)
    model = make_sharded(lambda: DeltaNetLM(config, rngs=nnx.Rngs(0)), mesh)
    kernel = model.blocks[0].mixer.q_proj.kernel[...]
    assert kernel.sharding.spec == jax.sharding.PartitionSpec("fsdp", "heads")
    assert kernel.addressable_shards[0].data.shape == (4, 4)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"heads": 4}, "axis `heads` of 4 must divide num_heads; got 2"),
        ({"fsdp": 3}, "axis `fsdp` of 3 must divide hidden_size; got 8"),
        ({"context": 5}, "axis `context` of 5 must divide the number of tokens; got 16"),
        ({"data": 8}, "`data` and `fsdp` of 8 together must divide the batch; got 4"),
    ],
)
def test_axes_that_do_not_divide_are_named(axes: dict, message: str) -> None:
    config = DeltaNetConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match=message):
        check_mesh(config, make_mesh(**axes), batch=4, tokens=16)


def test_too_large_meshes_are_named() -> None:
    with pytest.raises(ValueError, match="needs 64 devices; there are 8"):
        make_mesh(data=8, context=8)
    with pytest.raises(ValueError, match="`data` must be a positive integer; got 0"):
        make_mesh(data=0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(process: int, port: int, checkpoints: Path) -> subprocess.Popen:
    """One of two processes of two devices each, on a mesh of four: FSDP by context."""
    options = replace(
        OPTIONS,
        fsdp=2,
        context=2,
        steps=1000,
        checkpoints=checkpoints,
        coordinator=f"127.0.0.1:{port}",
        num_processes=2,
        process_id=process,
    )
    program = (
        "from pathlib import PosixPath\n"
        "from experiments.train_sharded import TrainSharded, run\n"
        f"run({options!r})\n"
    )
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_and_a_kill_change_no_loss(tmp_path: Path) -> None:
    """Killed after two steps, resumed here on eight devices instead of two by two."""
    options = replace(OPTIONS, steps=1000)
    port = _free_port()
    processes = [_start(i, port, tmp_path) for i in (0, 1)]
    seen, output = {}, []
    # Two processes that wait for each other must not hold up the other tests for ever.
    deadline = threading.Timer(600, processes[0].kill)
    deadline.start()
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            output.append(line)
            if found := re.match(r"step (\d+) loss ([\d.]+)", line):
                seen[int(found[1])] = float(found[2])
            if len(seen) == 2:
                break
    finally:
        deadline.cancel()
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    assert len(seen) == 2, "".join(output)
    # The last checkpoint may be of a later step: the processes ran on until they were killed.
    with Checkpoints(tmp_path) as checkpoints:
        first = checkpoints.latest_step()
    assert first is not None
    assert first >= 2
    whole = run(options, stop=first + 1)
    resumed = run(
        replace(options, fsdp=2, heads=2, context=2, checkpoints=tmp_path), stop=first + 1
    )
    np.testing.assert_allclose(_values(seen), _values(whole)[:2], **CLOSE)
    assert list(resumed) == [first]
    np.testing.assert_allclose(_values(resumed), _values(whole)[-1:], **CLOSE)
