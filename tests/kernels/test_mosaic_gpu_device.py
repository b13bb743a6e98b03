"""Every case of the Hopper kernels on the device: `pytest -m gpu tests/kernels`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.kernels import mosaic_gpu
from tests.kernels.gpu_problems import errors, inputs, outputs_and_gradients, problem
from tests.oracle import cotangents_for, expected
from tests.tolerances import TOLERANCES, relative_rms

pytestmark = pytest.mark.gpu

CASES = {
    "delta": {"B": 2, "T": 1024, "H": 4, "HV": 4, "K": 128, "V": 128},
    "gated-delta": {"B": 2, "T": 1024, "H": 4, "HV": 4, "K": 128, "V": 128, "gate": 0.2},
    "linear": {"B": 2, "T": 512, "H": 2, "HV": 2, "K": 128, "V": 128, "delta": False},
    "gated-linear": {"T": 512, "H": 2, "HV": 2, "K": 128, "V": 128, "delta": False, "gate": 0.2},
    "gated-small-grouped": {"T": 500, "HV": 3, "delta": False, "gate": 0.2},
    "gated-short": {"T": 5, "H": 2, "HV": 2, "K": 64, "V": 256, "gate": 0.2},
    "gated-both-256": {"T": 300, "H": 2, "HV": 2, "K": 256, "V": 256, "gate": 0.2},
    "strong-gate": {"T": 300, "H": 2, "HV": 2, "gate": 1.0},
    "grouped-ragged": {"T": 1000, "H": 2, "HV": 4, "K": 64, "V": 128, "gate": 0.2},
    "narrow-values": {"T": 1000, "H": 2, "HV": 4, "K": 128, "V": 64},
    "wide": {"T": 300, "H": 2, "HV": 2, "K": 256, "V": 256},
    "wide-gated": {"T": 300, "H": 2, "HV": 2, "K": 256, "V": 128, "gate": 0.2},
    "two-key-blocks": {"T": 300, "H": 2, "HV": 4, "K": 256, "V": 128},
    "small": {"B": 3, "T": 200, "H": 3, "HV": 3},
    "many-small": {"B": 3, "T": 140, "H": 45, "HV": 45},
    "many-small-gated": {"B": 3, "T": 140, "H": 45, "HV": 45, "gate": 0.2, "segments": True},
    "many-small-kda": {"B": 3, "T": 140, "H": 45, "HV": 45, "gate": 0.2, "channels": True},
    "many-wide-values": {"B": 3, "T": 140, "H": 45, "HV": 45, "V": 128, "gate": 0.2},
    "short": {"T": 5, "H": 2, "HV": 2, "K": 64, "V": 256},
    "segments": {"B": 2, "T": 700, "H": 2, "HV": 2, "K": 128, "V": 128, "segments": True},
    "split": {"T": 8200, "K": 128, "V": 128},
    "split-gated": {"T": 8200, "HV": 2, "K": 128, "V": 128, "gate": 0.2},
    "kda": {"B": 2, "T": 1024, "H": 4, "HV": 4, "K": 128, "V": 128, "gate": 0.2, "channels": True},
    "kda-strong": {"T": 300, "H": 2, "HV": 2, "gate": 20.0, "channels": True},
    "kda-grouped-segments": {
        "B": 2,
        "T": 700,
        "H": 2,
        "HV": 4,
        "K": 64,
        "V": 128,
        "gate": 0.5,
        "channels": True,
        "segments": True,
    },
    "kda-split": {"T": 8200, "K": 128, "V": 128, "gate": 0.05, "channels": True},
    "gla": {"T": 1000, "H": 2, "HV": 2, "K": 128, "delta": False, "gate": 1.0, "channels": True},
    "odd-sizes": {"B": 2, "T": 300, "H": 2, "HV": 4, "K": 24, "V": 50},
    "gated-odd-sizes": {"T": 500, "H": 2, "HV": 2, "K": 96, "V": 192, "gate": 0.2},
    "wide-values": {"T": 300, "H": 2, "HV": 2, "K": 256, "V": 512, "gate": 0.2, "segments": True},
    "gla-wide": {
        "T": 300,
        "H": 2,
        "HV": 2,
        "K": 256,
        "V": 300,
        "gate": 1.0,
        "delta": False,
        "channels": True,
    },
    "cos0.6": {"B": 2, "T": 1024, "H": 4, "HV": 4, "K": 128, "V": 128, "cos": 0.6},
}
HARDEST = {"B": 2, "T": 1024, "H": 4, "HV": 4, "K": 128, "V": 128, "cos": 0.9, "largest_beta": 2.0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_recurrence(name, dtype):
    forward, gradient = TOLERANCES[dtype]
    x = inputs(**CASES[name], dtype=dtype)
    for tensor, error in errors(mosaic_gpu.chunkwise, x, dtype).items():
        limit = forward if tensor in ("o", "state") else gradient
        assert error <= limit, f"{tensor}: {error:.2e} above {limit}"


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("gate", [{}, {"gate": 0.2, "segments": True}], ids=["delta", "gated"])
def test_the_forward_in_one_kernel_equals_the_recurrence(fused_launches, gate, size):
    """Inference where heads fill the SMs."""
    x = inputs(B=2, T=330, H=56, HV=112, K=size, V=size, **gate)
    o, state = mosaic_gpu.chunkwise(problem(x))
    assert fused_launches
    # The oracle takes some of the heads, which are independent.
    keys, values = [0, 55], [0, 1, 110, 111]
    heads = {"q": keys, "k": keys, "segment_ids": None}
    part = {
        name: y if heads.get(name, values) is None
        else np.take(y, heads.get(name, values), axis=1 if name == "initial_state" else 2)
        for name, y in x.items()
    }  # fmt: skip
    want = expected(part, cotangents_for(part))
    o, state = np.asarray(o, np.float32)[:, :, values], np.asarray(state)[:, values]
    assert relative_rms(o, want.o) <= TOLERANCES["bfloat16"].forward
    assert relative_rms(state, want.state) <= TOLERANCES["bfloat16"].forward


def test_the_gradient_of_very_strong_gates():
    found = errors(mosaic_gpu.chunkwise, inputs(T=300, H=2, HV=2, gate=5.0))
    assert max(found.values()) <= TOLERANCES["bfloat16"].gradient, found


@pytest.mark.parametrize("gate", [None, 0.1], ids=["delta", "gated-delta"])
@pytest.mark.parametrize(("size", "heads"), [(64, 4), (128, 4), (256, 1)])
def test_the_hardest_keys_stay_within_8e_3(size, heads, gate):
    sizes = {"H": heads, "HV": heads, "K": size, "V": size}
    found = errors(mosaic_gpu.chunkwise, inputs(**HARDEST | sizes, gate=gate))
    # Most of the gradient of `g` cancels: its error depends on the inputs (`docs/accuracy.md`).
    assert found.pop("dg", 0.0) <= TOLERANCES["bfloat16"].gradient
    assert max(found.values()) <= 8e-3, found


def test_two_runs_give_the_same_bits():
    x = inputs(**CASES["gated-delta"])
    first, second = (outputs_and_gradients(mosaic_gpu.chunkwise, x, "bfloat16") for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(np.asarray(first[name]), np.asarray(second[name]))


def test_vmap_is_a_larger_batch():
    from deltanet_jax import delta_rule

    x = inputs(B=2, T=200, H=2, HV=2, K=128, V=128)
    q, k, v = (jnp.asarray(x[name], jnp.bfloat16) for name in "qkv")
    beta = jnp.asarray(x["beta"])

    def loss(q, k, v, beta):
        o, state = delta_rule(q, k, v, beta, implementation="pallas")
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(state)

    whole = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, beta)
    one = lambda *a: jax.grad(loss, argnums=(0, 1, 2, 3))(*(y[None] for y in a))  # noqa: E731
    mapped = jax.jit(jax.vmap(one))(q, k, v, beta)
    for a, b in zip(whole, mapped, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b[:, 0], np.float32))


def test_many_programs_and_scan_and_remat():
    from deltanet_jax import delta_rule

    # More than 65535 programs, of two heads each.
    x = inputs(B=1, T=64, H=1, HV=1)
    q, k, v = (jnp.tile(jnp.asarray(x[n], jnp.bfloat16), (140000, 1, 1, 1)) for n in "qkv")
    beta = jnp.tile(jnp.asarray(x["beta"]), (140000, 1, 1))
    o, _ = delta_rule(q, k, v, beta, implementation="pallas")
    assert bool((o == o[:1]).all())

    # What a jitted function closes over becomes a constant of its program: one row, not all.
    q, k, v, beta = q[:1], k[:1], v[:1], beta[:1]

    @jax.jit
    def loss(q):
        def step(c, _):
            layer = lambda q: delta_rule(q, k, v, beta, implementation="pallas")[0]  # noqa: E731
            return jax.checkpoint(layer)(c), None

        return jnp.sum(jax.lax.scan(step, q, None, length=3)[0].astype(jnp.float32))

    assert bool(jnp.isfinite(jax.grad(loss)(q).astype(jnp.float32)).all())
