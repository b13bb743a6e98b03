"""The decoding kernel for a problem of one token, and its derivative."""

import dataclasses
import functools

import jax

from deltanet_jax import compat
from deltanet_jax.core.problem import Problem, Tokens, decay_with_resets, start_state
from deltanet_jax.core.step import step
from deltanet_jax.kernels.mosaic_gpu import decode
from deltanet_jax.kernels.mosaic_gpu.blocks.launches import batched, interpreter
from deltanet_jax.kernels.mosaic_gpu.support import why_not_one_token

__all__ = ["one_token"]


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
    state = start_state(problem)
    if problem.v.size == 0:
        return problem.v, state
    tokens = problem.tokens._replace(g=decay_with_resets(problem))
    token = jax.tree.map(lambda x: x[:, 0], tokens)
    o, state = _run(Call(problem.scale, in_place, interpreter(interpret)), token, state)
    return o[:, None], state


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@compat.with_default_promotion
def _run(call: Call, token: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Advance `state` by a token whose arrays have no time axis."""
    advance = functools.partial(
        decode.advance, scale=call.scale, in_place=call.in_place, interpret=call.interpret
    )
    o, state = batched(advance)(*token, state)
    return o, state


@_run.defjvp
def _run_jvp(
    call: Call, primals: tuple[Tokens, jax.Array], tangents: tuple[Tokens, jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Differentiate the plain step in XLA, in forward and reverse mode."""
    return jax.jvp(jax.checkpoint(functools.partial(_by_xla, call.scale)), primals, tangents)


def _by_xla(scale: float, token: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    group = token.v.shape[1] // token.q.shape[1]
    q, k = (compat.repeat(y, group, axis=1) for y in (token.q, token.k))
    g, beta = (x if x is None or x.ndim == k.ndim else x[..., None] for x in (token.g, token.beta))
    o, state = step(state, token._replace(q=q, k=k, g=g, beta=beta))
    return (o * scale).astype(token.v.dtype), state
