"""Context parallelism: the recurrence over a time axis that is sharded over devices."""

from collections.abc import Sequence
from dataclasses import replace

import jax
from jaxtyping import Array, Float, Int

from deltanet_jax import compat
from deltanet_jax.core.problem import Problem, start_state
from deltanet_jax.ops import canonical, dispatch
from deltanet_jax.ops.dispatch import Implementation
from deltanet_jax.ops.maps import sequence_map
from deltanet_jax.parallel.exchange import from_last, incoming_state, shift
from deltanet_jax.parallel.regions import check_axis

__all__ = ["linear_attention"]


def linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    *,
    axis_name: str,
    g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
    beta: Float[Array, "B T HV"] | None = None,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | Sequence[Implementation] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """`deltanet_jax.linear_attention` inside `shard_map`, for one shard of the time axis.

    Every device reduces its tokens to one affine map of the state, `S -> A S + B`. The maps are
    composed along the mesh axis, in `log2(devices)` exchanges of `K x (K + V)` numbers per head
    and row, or `K x (1 + V)` without the delta rule. Then every device runs its own tokens from
    the state that truly enters them. The result is that of one device, gradients included.

    Args:
        q: This device's queries; shards follow each other in the order of the mesh axis.
        k: Keys.
        v: Values.
        axis_name: The mesh axis that the time axis is sharded over.
        g: Log-decay.
        beta: Write strength.
        scale: Factor on `q`.
        initial_state: Initial state of the whole sequence, the same on every device of the axis.
        segment_ids: The state restarts where the id changes, at the border of shards too.
        chunk_size: Chunk size of the local run.
        implementation: Implementation of the local run.
        precision: Precision of matrix products; maps are always composed in full precision.

    Returns:
        This device's outputs, and the final state of the whole sequence on every device.

    Raises:
        ValueError: If an argument is wrong, `axis_name` is no manual axis of a surrounding
            `shard_map`, or `initial_state` differs along it.
        NotImplementedError: If the implementation that was asked for cannot run this call.

    Example:
        >>> D = jax.device_count()
        >>> x, tokens = jnp.ones((1, 2 * D, 1, 1)), jax.P(None, "context")
        >>> mesh, specs = make_mesh(context=D), {"in_specs": tokens, "out_specs": (tokens, jax.P())}
        >>> run = partial(linear_attention, axis_name="context")  # two tokens on each device
        >>> o, state = jax.shard_map(lambda x: run(x, x, x), mesh=mesh, **specs)(x)
        >>> state.item() == 2 * D
        True
    """
    check_axis("axis_name", axis_name)
    problem = canonical.canonical_problem(
        q,
        k,
        v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        precision=precision,
    )
    if initial_state is not None and axis_name in compat.varying_axes(initial_state):
        raise ValueError(
            f"`initial_state` must be the same on all devices of `{axis_name}`; "
            "it is typed as varying over that axis"
        )
    size = canonical.canonical_chunk_size(chunk_size)
    algorithm = dispatch.choose(implementation, problem, size)
    if problem.q.shape[1] == 0:
        return problem.v.astype(v.dtype), start_state(problem)
    if segment_ids is not None:
        problem = _with_border(problem, segment_ids, axis_name)
    with jax.named_scope("map_of_shard"):
        map_ = sequence_map(problem)
    with jax.named_scope("exchange"):
        incoming = incoming_state(map_, start_state(problem), axis_name)
    local = replace(problem, initial_state=incoming)
    o, final_state = dispatch.run(local, algorithm=algorithm, chunk_size=size)
    return o.astype(v.dtype), from_last(final_state, axis_name)


def _with_border(problem: Problem, segment_ids: jax.Array, axis_name: str) -> Problem:
    """Restart at a shard's first token if its segment is not that of the token before it."""
    assert problem.reset is not None
    before = shift(segment_ids[:, -1], axis_name)
    new = (segment_ids[:, 0] != before) & (jax.lax.axis_index(axis_name) > 0)
    reset = compat.vary_like(problem.reset, new).at[:, 0].set(new)
    return replace(problem, reset=reset)
