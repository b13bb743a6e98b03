"""The two oracles agree with each other, and the differentiated one with finite differences."""

import numpy as np
import pytest

from deltanet_jax.core import reference
from tests.cases import VARIANTS, Inputs, Shape, layer_like, rng_for
from tests.oracle import cotangents_for, expected
from tests.tolerances import assert_close

SHAPE = Shape(2, 9, 2, 3, 4, group=2)
SEGMENTS = np.array([[0, 0, 0, 3, 3, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5, 5, 2, 5]], np.int32)


def _reference(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    rest = {name: x for name, x in inputs.items() if name not in "qkv"}
    return reference.recurrence(inputs["q"], inputs["k"], inputs["v"], **rest)


@pytest.mark.parametrize("segments", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_oracles_agree(variant: str, segments: bool) -> None:
    inputs = layer_like(variant, SHAPE) | ({"segment_ids": SEGMENTS} if segments else {})
    o, state = _reference(inputs)
    want = expected(inputs)
    assert_close("o", want.o, o, 1e-14)
    assert_close("state", want.state, state, 1e-14)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_the_oracle_are_finite_differences(variant: str) -> None:
    """Along a random direction of each input, so that a wrong entry anywhere shows."""
    inputs = layer_like(variant, SHAPE) | {"segment_ids": SEGMENTS}
    inputs = {n: x if n == "segment_ids" else x.astype(np.float64) for n, x in inputs.items()}
    do, dstate = (c.astype(np.float64) for c in cotangents_for(inputs))

    def loss(x: Inputs) -> float:
        o, state = _reference(x)
        return float(np.sum(o * do) + np.sum(state * dstate))

    for name, gradient in expected(inputs).gradients.items():
        direction = rng_for("direction", name).standard_normal(gradient.shape)
        ahead, behind = (
            loss(inputs | {name: inputs[name] + sign * 1e-5 * direction}) for sign in (1, -1)
        )
        slope = (ahead - behind) / 2e-5
        assert abs(slope - np.sum(gradient * direction)) < 1e-7 * max(1, abs(slope)), name
