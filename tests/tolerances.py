"""The accuracy contract: one table, one metric, one assertion.

The metric is rms(x - reference) / rms(reference). A number here is never raised to make a
test pass; a change is a commit of its own with the measurement that justifies it.
"""

from typing import NamedTuple

import jax
import numpy as np

__all__ = ["TOLERANCES", "Tolerance", "assert_close", "relative_rms"]


class Tolerance(NamedTuple):
    forward: float
    gradient: float


TOLERANCES = {
    "float64": Tolerance(forward=1e-12, gradient=1e-12),
    "float32": Tolerance(forward=1e-5, gradient=1e-4),
    "float16": Tolerance(forward=6e-3, gradient=1e-2),
    "bfloat16": Tolerance(forward=6e-3, gradient=1e-2),
}


def relative_rms(x: jax.typing.ArrayLike, reference: jax.typing.ArrayLike) -> float:
    """rms(x - reference) / rms(reference); the numerator alone where the reference is zero."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    if x.shape != reference.shape:
        raise ValueError(f"shapes disagree: {x.shape} and {reference.shape}")
    if x.size == 0:
        return 0.0
    # In units of the largest element, the squares of huge and of tiny tensors stay in range.
    unit = np.max(np.abs(reference)) or 1.0
    error, size = (float(np.sqrt(np.mean(np.square(a / unit)))) for a in (x - reference, reference))
    return error / size if size > 0 else error


def assert_close(
    name: str, x: jax.typing.ArrayLike, reference: jax.typing.ArrayLike, tolerance: float
) -> None:
    """Fail with the tensor's name, its error and its worst element; what is not finite fails."""
    assert np.shape(x) == np.shape(reference), f"{name}: {np.shape(x)} vs {np.shape(reference)}"
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    assert np.isfinite(reference).all(), f"{name}: the reference is not finite"
    missing = np.sum(~np.isfinite(x))
    assert missing == 0, f"{name}: {missing} of {x.size} elements are not finite"
    error = relative_rms(x, reference)
    if error > tolerance:
        worst = np.unravel_index(np.argmax(np.abs(x - reference)), x.shape)
        place = ", ".join(map(str, worst))
        raise AssertionError(
            f"{name}: relative rms error {error:.2e} above {tolerance:.0e}; "
            f"worst at [{place}]: {x[worst]:.6g}, expected {reference[worst]:.6g}"
        )
