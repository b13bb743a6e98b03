"""Ahead-of-time compilation of the Hopper kernels for an H200, on a machine without a GPU."""

import re

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deltanet_jax.kernels.mosaic_gpu import support, tuning
from deltanet_jax.kernels.mosaic_gpu.blocks import launches
from tests.kernels.compiling import (
    CALLS,
    MANY,
    NEEDED,
    OTHER_SMS,
    SMS,
    STEPS,
    Call,
    lower,
    shared_memory,
)

pytestmark = NEEDED

# Most bytes that a thread stores for want of registers, on jax 0.12.0.1; others none.
KNOWN_SPILLS = {
    (64, "kda"): {"channel_gradients": 40},
    (128, "kda"): {"decayed_chunks": 8, "channel_gradients": 40},
}
KERNELS = {"run_states", "reverse_states", "chunk_gradients"}
VECTOR_KERNELS = {
    "decayed_chunks", "run_states", "reverse_states", "chunk_cotangents", "channel_gradients",
}  # fmt: skip


def wanted_kernels(call: Call) -> set[str]:
    """Return the kernels that a call consists of."""
    if call.kind == "kda":
        return VECTOR_KERNELS
    gated, delta = "gated" in call.kind, "delta" in call.kind
    if not call.backward:
        return {"run_states"} | ({"gate_vectors"} if gated else set())
    gates = {"gate_vectors", "gate_gradient"} if gated else set()
    return KERNELS | gates | ({"chunk_inverses"} if delta else set())


@pytest.fixture
def estimates(monkeypatch) -> dict[str, int]:
    """Bytes of shared memory by the estimate, of every kernel that a test traces."""
    sizes = {}

    def spy(launch, scratch_from: int):
        def wrapped(name, *args, **options):
            sizes[name] = launches.shared_memory(*args[scratch_from:])
            return launch(name, *args, **options)

        return wrapped

    monkeypatch.setattr(launches, "launch", spy(launches.launch, 3))
    monkeypatch.setattr(launches, "overwriting", spy(launches.overwriting, 2))
    return sizes


def compiled(lowered, capfd) -> tuple[str, str]:
    """Compile a call; return the program, and what the compiler says of each kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        program = lowered.compile().as_text()
    return program, capfd.readouterr().out


def spills(log: str) -> dict[str, int]:
    """Return the bytes that a thread of each kernel stores for want of registers."""
    found = re.findall(
        r"properties for (\w+?)_mosaic_gpu.*?(\d+) bytes spill stores", log, re.DOTALL
    )
    return {name: int(stores) for name, stores in found}


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_calls_compile_for_an_h200_without_spills(call, capfd, estimates):
    lowered = lower(call)
    for name, size in shared_memory(lowered).items():
        assert size - estimates[name] in (0, launches.REDUCTIONS), name
    found = spills(compiled(lowered, capfd)[1])
    assert set(found) == wanted_kernels(call)
    known = KNOWN_SPILLS.get((call.sizes[3], call.kind), {})
    for name, stores in found.items():
        assert stores <= known.get(name, 0), f"{name} spills more than is known"


@pytest.mark.parametrize("sms", OTHER_SMS)
@pytest.mark.parametrize("kind", ["gated-delta", "kda"])
def test_calls_compile_for_hopper_gpus_with_fewer_sms(sms, kind, capfd):
    call = Call((2, 320, 12, 128, 128), kind)
    found = spills(compiled(lower(call, sms), capfd)[1])
    known = KNOWN_SPILLS.get((128, kind), {})
    for name, stores in found.items():
        assert stores <= known.get(name, 0), f"{name} spills more than is known"


@pytest.mark.parametrize("sms", [SMS, *OTHER_SMS])
def test_persistent_kernels_have_one_wave_of_thread_blocks(sms, monkeypatch):
    """Their grids follow the number of SMs of the GPU that they are compiled for."""
    grids, meshes = {}, []
    kernel, mesh = plgpu.kernel, plgpu.Mesh

    def spy_on_kernel(body, *, grid, **options):
        grids[body.__name__] = grid
        return kernel(body, grid=grid, **options)

    def spy_on_mesh(*, grid, **options):
        meshes.append(grid)
        return mesh(grid=grid, **options)

    monkeypatch.setattr(plgpu, "kernel", spy_on_kernel)
    monkeypatch.setattr(plgpu, "Mesh", spy_on_mesh)
    lower(Call(MANY, "gated-delta"), sms)
    assert meshes[-1] == (sms,)  # of `chunk_gradients`
    residents = {
        row.key_dim: row.config.residents for row in tuning.ROWS if row.kernel == "chunk_inverses"
    }
    assert grids["chunk_inverses"] == (residents[128] * sms,)
    lower(Call(MANY, "kda"), sms)
    assert grids["decayed_chunks"] == (sms,)


@pytest.mark.skipif(
    support.why_not_compile_one_token() is not None, reason=str(support.why_not_compile_one_token())
)
@pytest.mark.parametrize("call", STEPS, ids=str)
def test_a_donated_state_is_overwritten_by_one_kernel(call, capfd):
    """Nothing but the kernel touches the state, and its registers suffice."""
    program, log = compiled(lower(call), capfd)
    assert spills(log) == {"decode": 0}
    B, H, K = call.sizes
    state = rf"f32\[{B},{H},{K},{K}\]"
    users = re.findall(rf"= .*{state}.* ([\w-]+)\(", program.split("ENTRY")[1])
    assert sorted(set(users) - {"parameter", "get-tuple-element", "tuple"}) == ["custom-call"]
