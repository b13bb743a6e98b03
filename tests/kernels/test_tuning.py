"""The table of configurations of the Hopper kernels."""

import itertools

import jax.numpy as jnp
import pytest

from deltanet_jax.kernels.mosaic_gpu.shape import Shape
from deltanet_jax.kernels.mosaic_gpu.sizes import HEAD_DIMS
from deltanet_jax.kernels.mosaic_gpu.tuning import HOPPER, ROWS, Call, config_of

BOTH = (False, True)
GATES = ("none", "scalar", "vector")
KERNELS = sorted({row.kernel for row in ROWS})


def _first_rows(kernel: str) -> list[int | None]:
    """Return the number of the row that holds for each call of a kernel."""
    calls = itertools.product([kernel], HEAD_DIMS, HEAD_DIMS, GATES, BOTH, BOTH, BOTH, [HOPPER])
    found = []
    for call in calls:
        numbers = (number for number, row in enumerate(ROWS) if row.covers(Call(*call)))
        found.append(next(numbers, None))
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_row_is_the_first_one_of_some_calls(kernel):
    reached = set(_first_rows(kernel)) - {None}
    assert reached == {number for number, row in enumerate(ROWS) if row.kernel == kernel}


@pytest.mark.parametrize("kernel", sorted({*KERNELS} - {"run_states_fused"}))
def test_every_call_has_a_configuration(kernel):
    assert None not in _first_rows(kernel)


def test_registers_of_a_thread_block_are_those_of_an_sm():
    for row in ROWS:
        registers, config = row.config.registers, row.config
        if len(registers) == 2:
            # `run_states_fused` has two producers, the recurrent kernels one for every item.
            producers = 2 if row.kernel == "run_states_fused" else config.items
            consumers = config.columns * config.items
            registers = (registers[0],) * consumers + (registers[1],) * producers
        assert sum(registers) <= (504 if len(registers) == 3 else 512), row


def test_a_call_without_a_row_is_refused_by_name():
    sizes = {"batch": 1, "tokens": 64, "heads": 1, "group": 1, "key_dim": 256, "value_dim": 64}
    shape = Shape(**sizes, dtype=jnp.dtype("bfloat16"), delta=True, gate="none")
    with pytest.raises(NotImplementedError, match="`run_states_fused` has no configuration"):
        config_of("run_states_fused", shape)
