"""Every wrong call raises an error that names the argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deltanet_jax as d

B, T, H, HV, K, V = 2, 5, 2, 4, 3, 6
ones = np.ones


def good():
    return {
        "q": ones((B, T, H, K), np.float32),
        "k": ones((B, T, H, K), np.float32),
        "v": ones((B, T, HV, V), np.float32),
        "beta": ones((B, T, HV), np.float32),
    }


WRONG = {
    "q-rank": ({"q": ones((B, T, K), np.float32)}, "`q` must have shape"),
    "q-list": ({"q": [1.0]}, "`q` must be an array"),
    "q-integers": ({"q": ones((B, T, H, K), np.int32)}, "`q` must have a dtype"),
    "q-complex": ({"q": ones((B, T, H, K), np.complex64)}, "`q` must have a dtype"),
    "k-time": ({"k": ones((B, T + 1, H, K), np.float32)}, "`k` must have shape"),
    "k-dim": ({"k": ones((B, T, H, K + 1), np.float32)}, "`k` must have shape"),
    "k-heads": ({"k": ones((B, T, 1, K), np.float32)}, "`k` must have shape"),
    "v-batch": ({"v": ones((1, T, HV, V), np.float32)}, "`v` must have shape"),
    "v-swapped-axes": ({"v": ones((B, HV, T, V), np.float32)}, "`v` must have shape"),
    "v-heads": ({"v": ones((B, T, 3, V), np.float32)}, "heads of `v`"),
    "beta-broadcast": ({"beta": ones((B, T, 1), np.float32)}, "`beta` must have shape"),
    "beta-trailing-one": ({"beta": ones((B, T, HV, 1), np.float32)}, "`beta` must have shape"),
    "beta-key-heads": ({"beta": ones((B, T, H), np.float32)}, "`beta` must have shape"),
    "beta-number": ({"beta": 1.0}, "`beta` must be an array"),
    "g-heads": ({"g": -ones((B, T, H), np.float32)}, "`g` must have shape"),
    "g-channels": ({"g": -ones((B, T, HV, 1), np.float32)}, "`g` must have shape"),
    "g-growth": ({"g": ones((B, T, HV), np.float32)}, "`g` is a log-decay"),
    "g-integers": ({"g": -ones((B, T, HV), np.int32)}, "`g` must have a dtype"),
    "state-transposed": (
        {"initial_state": ones((B, HV, V, K), np.float32)},
        "`initial_state` must have shape",
    ),
    "segments-float": ({"segment_ids": ones((B, T), np.float32)}, "`segment_ids` must have an int"),
    "segments-shape": ({"segment_ids": ones((T,), np.int32)}, "`segment_ids` must have shape"),
    "segments-list": ({"segment_ids": [[0] * T] * B}, "`segment_ids` must be an integer array"),
    "chunk-zero": ({"chunk_size": 0}, "`chunk_size` must be a positive integer"),
    "chunk-negative": ({"chunk_size": -16}, "`chunk_size`"),
    "chunk-float": ({"chunk_size": 16.0}, "`chunk_size`"),
    "chunk-bool": ({"chunk_size": True}, "`chunk_size`"),
    "scale-array": ({"scale": ones(3, np.float32)}, "`scale` must be a number"),
    "scale-text": ({"scale": "big"}, "`scale` must be a number"),
    "scale-digits": ({"scale": "0.5"}, "`scale` must be a number"),
    "scale-bool": ({"scale": True}, "`scale` must be a number"),
    "scale-nan": ({"scale": float("nan")}, "`scale` must be finite; got nan"),
    "scale-infinite": ({"scale": float("inf")}, "`scale` must be finite; got inf"),
    "no-key-channels": (
        {"q": ones((B, T, H, 0), np.float32), "k": ones((B, T, H, 0), np.float32)},
        "`q` must have K >= 1",
    ),
    "beta-above-two": ({"beta": 3 * ones((B, T, HV), np.float32)}, "`beta` must be in"),
    "beta-negative": ({"beta": -ones((B, T, HV), np.float32)}, "`beta` must be in"),
    "precision": ({"precision": "sloppy"}, "`precision` must be"),
    "implementation-name": ({"implementation": "flash"}, "`implementation` must be one of"),
    "implementation-number": ({"implementation": 3}, "`implementation`"),
    "implementation-none-named": ({"implementation": ()}, "`implementation` must name"),
    "implementation-in-sequence": (
        {"implementation": ("chunkwise", "flash")},
        "`implementation` must be one of",
    ),
    "keyword": ({"initial_sate": None}, "initial_sate"),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_argument_is_named(change):
    arguments, message = WRONG[change]
    with pytest.raises(ValueError, match=message):
        d.linear_attention(**good() | arguments)


def test_shapes_are_checked_under_jit_too():
    bad = good() | {"beta": ones((B, T, 1), np.float32)}
    with pytest.raises(ValueError, match="`beta` must have shape"):
        jax.jit(lambda arguments: d.linear_attention(**arguments))(bad)


def test_messages_say_what_came_and_what_was_wanted():
    with pytest.raises(ValueError, match=r"\[2, 5, 4\]; got \(2, 5, 1\)"):
        d.linear_attention(**good() | {"beta": ones((B, T, 1), np.float32)})


def test_missing_gates_of_named_members_are_named():
    q, k, v, beta = good().values()
    g = -ones((B, T, HV), np.float32)
    with pytest.raises(ValueError, match="`beta` is required"):
        d.delta_rule(q, k, v, None)
    with pytest.raises(ValueError, match="`g` is required"):
        d.gated_delta_rule(q, k, v, None, beta)
    with pytest.raises(ValueError, match="`g` is required"):
        d.gated_linear_attention(q, k, v, None)
    with pytest.raises(ValueError, match=r"`g` must have shape \[B, T, HV, K\]"):
        d.kimi_delta_attention(q, k, v, g, beta)
    vector = -ones((B, T, HV, q.shape[-1]), np.float32)
    with pytest.raises(ValueError, match=r"`g` must have shape \[B, T, HV\].*`kimi_delta_att"):
        d.gated_delta_rule(q, k, v, vector, beta)
    with pytest.raises(ValueError, match="missing a required argument: 'beta'"):
        d.delta_rule(q, k, v)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": ones((B, 1, H, K), np.float32)}, "`q` must have shape"),
        ({"v": ones((B, HV), np.float32)}, "`v` must have shape"),
        ({"state": None}, "`state` is required"),
        ({"state": ones((B, HV, V, K), np.float32)}, "must have shape"),
        ({"g": 0.5 * ones((B, HV), np.float32)}, "`g` is a log-decay"),
        ({"beta": ones((B, 1), np.float32)}, "`beta` must have shape"),
    ],
)
def test_a_wrong_step_is_named(change, message):
    token = {
        "q": ones((B, H, K), np.float32),
        "k": ones((B, H, K), np.float32),
        "v": ones((B, HV, V), np.float32),
        "state": ones((B, HV, K, V), np.float32),
    }
    with pytest.raises(ValueError, match=message):
        d.step(**token | change)


def test_fewer_tokens_than_heads_is_no_reason_to_complain(recwarn):
    q = jnp.ones((1, 2, 8, 4))
    d.delta_rule(q, q, q, jnp.ones((1, 2, 8)))
    assert not recwarn.list


def test_a_traced_scale_is_refused_with_the_way_out():
    q = jnp.ones((1, 2, 1, 4))
    with pytest.raises(ValueError, match="multiply `q`"):
        jax.jit(lambda s: d.linear_attention(q, q, q, scale=s))(0.5)
