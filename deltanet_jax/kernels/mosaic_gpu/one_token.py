"""The decoding kernel for a problem of one token, and what it becomes when differentiated."""

import dataclasses
import functools
from typing import NamedTuple

import jax

from deltanet_jax import compat
from deltanet_jax.core import recurrence
from deltanet_jax.core.recurrence import Problem, decay_with_resets, start_state
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import batched
from deltanet_jax.kernels.mosaic_gpu.support import why_not_one_token

__all__ = ["one_token"]


class Token(NamedTuple):
    """The differentiable arrays of one token."""

    q: jax.Array  # [B, H, K]
    k: jax.Array  # [B, H, K]
    v: jax.Array  # [B, HV, V]
    g: jax.Array | None  # [B, HV] or [B, HV, K] float32
    beta: jax.Array | None  # [B, HV] float32
    state: jax.Array  # [B, HV, K, V] float32


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of one call."""

    scale: float
    in_place: bool
    interpret: object  # None, or the interpreter's parameters


def one_token(
    problem: Problem, *, in_place: bool, interpret: object = False
) -> tuple[jax.Array, jax.Array]:
    """Advance a problem that `why_not_one_token` accepts by its token.

    Args:
        problem: One call in canonical form.
        in_place: Overwrite the state where XLA can prove that nobody reads it again: it was
            donated, or is the carry of a scan. Where it cannot, it copies the state first.
            Without this the next state is always a new array.
        interpret: True for Pallas's GPU interpreter, or its parameters.

    Returns:
        Outputs `[B, 1, HV, V]` in the dtype of `v`, and the next state in float32.

    Raises:
        NotImplementedError: If the kernel does not cover the problem.
    """
    reason = why_not_one_token(problem)
    if reason is not None:
        raise NotImplementedError(reason)
    if interpret is True:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams()
    state = start_state(problem)
    if problem.v.size == 0:
        return problem.v, state
    parts = (problem.q, problem.k, problem.v, decay_with_resets(problem), problem.beta)
    token = Token(*(None if x is None else x[:, 0] for x in parts), state)
    o, state = _run(Call(problem.scale, in_place, interpret or None), token)
    return o[:, None], state


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(call: Call, x: Token) -> tuple[jax.Array, jax.Array]:
    from deltanet_jax.kernels.mosaic_gpu import decode

    advance = functools.partial(
        decode.advance, scale=call.scale, in_place=call.in_place, interpret=call.interpret
    )
    o, state = batched(advance)(*x)
    return o, state


@_run.defjvp
def _run_jvp(
    call: Call, primals: tuple[Token], tangents: tuple[Token]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Whoever differentiates gets XLA's derivative of the plain step, forward and reverse."""
    return jax.jvp(jax.checkpoint(functools.partial(_by_xla, call.scale)), primals, tangents)


def _by_xla(scale: float, x: Token) -> tuple[jax.Array, jax.Array]:
    group = x.v.shape[1] // x.q.shape[1]
    q, k = (compat.repeat(y, group, axis=1) for y in (x.q, x.k))
    o, state = recurrence.step(x.state, q, k, x.v, x.g, x.beta)
    return (o * scale).astype(x.v.dtype), state
