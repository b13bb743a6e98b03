"""How the experiments have programs compiled."""

import os

import pytest

from experiments.compiling import prefer_quick_compilation

AUTOTUNE, TRITON = "--xla_gpu_autotune_level", "--xla_gpu_enable_triton_gemm"


@pytest.mark.parametrize("given", [None, "--xla_dump_to=/nowhere", f"{AUTOTUNE}=4"])
def test_what_the_user_asks_of_xla_stays(monkeypatch, given):
    if given is None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    else:
        monkeypatch.setenv("XLA_FLAGS", given)
    prefer_quick_compilation()
    flags = os.environ["XLA_FLAGS"].split()
    assert given is None or flags[0] == given
    values = dict(flag.split("=") for flag in flags)
    assert values[TRITON] == "false"
    assert values[AUTOTUNE] == ("4" if given == f"{AUTOTUNE}=4" else "0")
