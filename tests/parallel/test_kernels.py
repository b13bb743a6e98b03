"""The time axis over devices that run their tokens in the kernels; here, in the interpreter."""

from functools import partial

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from deltanet_jax import parallel
from deltanet_jax.core.problem import Problem
from deltanet_jax.kernels.partition import over_devices
from deltanet_jax.ops.dispatch import IMPLEMENTATIONS, Implementation
from tests.cases import VARIANTS, Inputs, Shape, layer_like
from tests.checks import assert_matches
from tests.oracle import Expected, cotangents_for, expected

SHAPE = Shape(2, 32, 1, 64, 64)
TIME = P(None, "context")


def _split(p: Problem, chunk_size: int | None) -> tuple[jax.Array, jax.Array]:
    """Split as kernels are, over axes that XLA would split by itself."""
    return over_devices(lambda x: IMPLEMENTATIONS["chunkwise_solve"].algorithm(x, chunk_size), p)


@pytest.mark.parametrize(
    ("variant", "implementation", "sizes"),
    [
        *(pytest.param(variant, "pallas", {}, id=variant) for variant in VARIANTS),
        pytest.param("gated_delta", _split, {"data": 2}, id="beside-the-batch"),
    ],
)
def test_kernels_start_from_the_state_that_enters_their_tokens(
    variant: str, implementation: Implementation, sizes: dict[str, int]
) -> None:
    """Outputs, state and gradients; a second mesh axis splits the batch."""
    inputs = layer_like(variant, SHAPE)
    sizes = sizes | {"context": 2}
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    specs = {name: P() if name == "initial_state" else TIME for name in inputs}
    call = partial(parallel.linear_attention, axis_name="context", implementation=implementation)
    run = jax.shard_map(
        lambda x: call(**x, chunk_size=16),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(TIME, P()),
        axis_names={"context"},
    )

    @jax.jit
    def program(x: Inputs, cotangents: tuple) -> tuple:
        outputs, pull = jax.vjp(run, x)
        return outputs, pull(cotangents)[0]

    (o, state), gradients = program(inputs, cotangents_for(inputs))
    assert_matches(Expected(o, state, gradients), expected(inputs))
