"""Our operators against the naive and chunk references of fla-core and of transformers."""

import numpy as np
import pytest
from fla.ops.delta_rule import naive as delta
from fla.ops.gated_delta_rule import naive as gated
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.kda import naive as kda
from fla.ops.linear_attn import naive as linear
from fla.ops.simple_gla import naive as simple
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from tests import checks
from tests.parity.torch_side import heads_first, pullback
from tests.tolerances import TOLERANCES, assert_close

OURS = ("recurrent", "chunkwise", "chunkwise_solve")


def _delta_recurrence(x):
    parts = heads_first(x["q"], x["k"], x["v"], x["beta"])
    o, state = delta.delta_rule_recurrence(*parts, x["initial_state"])
    return o.transpose(1, 2), state


def _delta_chunks(x):
    o, state = delta.delta_rule_chunkwise(*heads_first(x["q"], x["k"], x["v"], x["beta"]), 16)
    return o.transpose(1, 2), state


def _qwen(function):
    # The wrapper would take fla's kernel, which no CPU runs.
    return lambda x: function.__wrapped__(*_in_order(x), **_state(x))


def _in_order(x, *names):
    return [x[name] for name in names or ("q", "k", "v", "g", "beta")]


def _state(x):
    return {"initial_state": x["initial_state"], "output_final_state": True}


# Each with the variant that it computes: which gate, whether the delta rule, grouped heads.
REFERENCES = {
    "fla-delta-recurrence": (_delta_recurrence, "delta", True),
    "fla-delta-chunks": (_delta_chunks, "delta", False),
    "fla-gated-delta-recurrence": (
        lambda x: gated.naive_recurrent_gated_delta_rule(
            *_in_order(x, "q", "k", "v", "beta", "g"), **_state(x)
        ),
        "gated-delta",
        True,
    ),
    "fla-gated-delta-chunks": (
        lambda x: gated.naive_chunk_gated_delta_rule(*_in_order(x), chunk_size=16, **_state(x)),
        "gated-delta",
        True,
    ),
    "fla-kda-recurrence": (
        lambda x: kda.naive_recurrent_kda(*_in_order(x), **_state(x)),
        "kda-grouped",
        True,
    ),
    "fla-kda-chunks": (
        lambda x: kda.naive_chunk_kda(*_in_order(x), chunk_size=16, **_state(x)),
        "kda-grouped",
        True,
    ),
    "fla-gla-recurrence": (
        lambda x: naive_recurrent_gla(*_in_order(x, "q", "k", "v", "g"), **_state(x)),
        "gla",
        True,
    ),
    "fla-simple-gla-recurrence": (
        lambda x: simple.naive_recurrent_simple_gla(*_in_order(x, "q", "k", "v", "g"), **_state(x)),
        "simple-gla",
        True,
    ),
    "fla-simple-gla-chunks": (
        lambda x: simple.naive_chunk_simple_gla(
            *_in_order(x, "q", "k", "v", "g"), chunk_size=16, **_state(x)
        ),
        "simple-gla",
        True,
    ),
    "fla-linear-recurrence": (
        lambda x: linear.naive_recurrent_linear_attn(*_in_order(x, "q", "k", "v"), **_state(x)),
        "linear",
        True,
    ),
    "fla-linear-chunks": (
        lambda x: (linear.naive_chunk_linear_attn(*_in_order(x, "q", "k", "v")), None),
        "linear",
        False,
    ),
    "qwen3-next-recurrence": (
        _qwen(qwen.torch_recurrent_gated_delta_rule),
        "gated-delta-grouped",
        True,
    ),
    "qwen3-next-chunks": (_qwen(qwen.torch_chunk_gated_delta_rule), "gated-delta-grouped", True),
}
B, T, K, V = 2, 128, 8, 12  # two chunks of 64, where that is theirs


def inputs_of(member: str, with_state: bool) -> dict[str, np.ndarray]:
    """Unit keys that look alike, weak to strong decay, write strengths in (0, 2)."""
    rng = np.random.default_rng(3)
    H, HV = (2, 4) if member.endswith("grouped") else (3, 3)
    k = rng.normal(size=(B, T, H, K)) + 1.5
    x = {
        "q": rng.normal(size=(B, T, H, K)),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.normal(size=(B, T, HV, V)),
    }
    if "gla" in member or "gated" in member or "kda" in member:
        vector = member in ("gla", "kda-grouped")
        x["g"] = -np.exp(rng.uniform(-5, 0.5, size=(B, T, HV, K) if vector else (B, T, HV)))
    if "delta" in member or "kda" in member:
        x["beta"] = rng.uniform(0.05, 1.95, size=(B, T, HV))
    if with_state:
        x["initial_state"] = rng.normal(size=(B, HV, K, V))
    return {name: value.astype(np.float32) for name, value in x.items()}


@pytest.mark.parametrize("name", REFERENCES)
def test_outputs_states_and_gradients_agree(name):
    reference, member, with_state = REFERENCES[name]
    inputs = inputs_of(member, with_state)
    want = pullback(reference, inputs)
    for implementation in OURS:
        cotangents = None
        if want.state is None:
            o_part, state_part = checks.cotangents_for(inputs)
            cotangents = (o_part, np.zeros_like(state_part))
        got = checks.run(inputs, implementation, cotangents=cotangents)
        tolerance = TOLERANCES["float32"]
        assert_close(f"{implementation}: o", got.o, want.o, tolerance.forward)
        if want.state is not None:
            assert_close(f"{implementation}: state", got.state, want.state, tolerance.forward)
        for key, gradient in want.gradients.items():
            assert_close(
                f"{implementation}: d{key}", got.gradients[key], gradient, tolerance.gradient
            )
