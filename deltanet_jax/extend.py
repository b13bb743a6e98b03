"""The stable surface for people who write an implementation of their own.

An implementation is a function `(problem, chunk_size) -> (o, final_state)`; pass it as
`implementation=`. What it cannot run it says in an attribute `why_not`, a function
`(problem, chunk_size)` that returns a sentence or `None`.

Example:
    >>> from deltanet_jax import linear_attention
    >>> def sums_of_values(problem, chunk_size):
    ...     o = jnp.cumsum(problem.v, axis=1)
    ...     return o, start_state(problem)
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> o, _ = linear_attention(x, x, x, implementation=sums_of_values)
    >>> o.ravel().tolist()
    [1.0, 2.0, 3.0]
"""

from deltanet_jax.core.affine import compose
from deltanet_jax.core.chunk import prepare_wy
from deltanet_jax.core.chunk_solve import solve_chunk
from deltanet_jax.core.numerics import dot
from deltanet_jax.core.problem import Problem, Tokens, start_state, tokens_of
from deltanet_jax.core.step import step

__all__ = [
    "Problem",
    "Tokens",
    "compose",
    "dot",
    "prepare_wy",
    "solve_chunk",
    "start_state",
    "step",
    "tokens_of",
]
