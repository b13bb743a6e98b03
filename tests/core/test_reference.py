"""The NumPy oracle against cases small enough to work out by hand."""

import numpy as np

from deltanet_jax.core.reference import recurrence


def _tokens(*rows: list[float]) -> np.ndarray:
    """`[1, T, 1, D]` from one list per token."""
    return np.array(rows, np.float64)[None, :, None]


ONE = np.ones((1, 2, 1, 1))


def test_linear_attention_sums_outer_products() -> None:
    q, k = _tokens([1, 0], [1, 1]), _tokens([2, 0], [0, 3])
    v = _tokens([1, 10], [5, 7])
    o, state = recurrence(q, k, v, scale=1.0)
    np.testing.assert_array_equal(state[0, 0], [[2, 20], [15, 21]])
    np.testing.assert_array_equal(o[0, :, 0], [[2, 20], [17, 41]])


def test_delta_rule_replaces_what_a_unit_key_held() -> None:
    k = _tokens([1, 0], [1, 0])
    o, state = recurrence(k, k, _tokens([4, 8], [6, 2]), beta=np.array([[[1.0], [0.5]]]), scale=1.0)
    np.testing.assert_array_equal(o[0, :, 0], [[4, 8], [5, 5]])
    np.testing.assert_array_equal(state[0, 0], [[5, 5], [0, 0]])


def test_decay_comes_before_the_error_is_read() -> None:
    """S = 1/2 * 8 = 4 is what the error sees: 4 + 1/2 (6 - 4) = 5; decay last would give 3.5."""
    g = np.log([[[1.0], [0.5]]])
    _, state = recurrence(
        ONE, ONE, _tokens([8], [6]), g=g, beta=np.array([[[1.0], [0.5]]]), scale=1.0
    )
    np.testing.assert_allclose(state, 5, rtol=1e-15)


def test_vector_gate_decays_rows_of_the_state() -> None:
    k = _tokens([1, 1], [0, 0])
    g = np.log([[[[1.0, 1.0]], [[0.5, 0.25]]]])
    _, state = recurrence(k, k, _tokens([4, 8], [0, 0]), g=g)
    np.testing.assert_allclose(state[0, 0], [[2, 4], [1, 2]], rtol=1e-15)


def test_output_is_read_after_the_write_and_scaled_once() -> None:
    o, _ = recurrence(ONE[:, :1] * 3, ONE[:, :1], _tokens([5]), scale=2.0)
    assert o.item() == 30.0


def test_default_scale_is_the_inverse_root_of_the_key_dim() -> None:
    k = _tokens([1, 1, 1, 1])
    o, _ = recurrence(k, k, _tokens([1]))
    assert o.item() == 2.0


def test_value_heads_read_their_group_of_key_heads() -> None:
    k = np.array([1.0, 10.0]).reshape(1, 1, 2, 1)
    _, state = recurrence(k, k, np.ones((1, 1, 6, 1)))
    np.testing.assert_array_equal(state.ravel(), [1, 1, 1, 10, 10, 10])


def test_a_change_of_segment_restarts_from_zero() -> None:
    k = np.ones((1, 4, 1, 1))
    ids = np.array([[7, 7, 0, 7]])
    o, state = recurrence(
        k,
        k,
        _tokens([1], [2], [4], [8]),
        scale=1.0,
        initial_state=np.full((1, 1, 1, 1), 100.0),
        segment_ids=ids,
    )
    np.testing.assert_array_equal(o.ravel(), [101, 103, 4, 8])
    assert state.item() == 8


def test_the_initial_state_is_not_written_to() -> None:
    start = np.ones((1, 1, 1, 1))
    recurrence(ONE, ONE, _tokens([8], [6]), initial_state=start)
    assert start.item() == 1.0
