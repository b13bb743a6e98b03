"""Decay inside a chunk: the only place where the three kinds of gate differ.

`b_i = sum_{j<=i} g_j` is the cumulative log-decay of a chunk. Every quantity here is the
exponential of a sum over a *range* of tokens, and every such sum is formed directly, as a
product of `g` with a constant 0/1 matrix, never as a difference of two cumulative sums: after
one huge gate (a reset) such a difference has no digits left. All exponents are <= 0.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from deltanet_jax.core.numerics import dot

__all__ = ["decay_from_start", "decay_to_end", "scores", "total_decay"]

SHARES = 2  # of the channels, that a system's products are summed over
SUB_BLOCK = 16  # rows of a vector gate between two reference rows


def decay_from_start(g: Float[Array, "*B C D"] | None) -> Float[Array, "*B C D"] | None:
    """`exp(b_i)`: from the start of the chunk through token i."""
    return None if g is None else jnp.exp(_range_sums(np.tri(g.shape[-2]), g))


def decay_to_end(g: Float[Array, "*B C D"] | None) -> Float[Array, "*B C D"] | None:
    """`exp(b_C - b_i)`: from after token i to the end of the chunk."""
    return None if g is None else jnp.exp(_range_sums(np.tri(g.shape[-2], k=-1).T, g))


def total_decay(g: Float[Array, "*B C D"] | None) -> Float[Array, "*B D 1"] | None:
    """`exp(b_C)`, shaped to scale a state."""
    return None if g is None else jnp.exp(jnp.sum(g, axis=-2))[..., None]


def scores(
    x: Float[Array, "*B C K"],
    y: Float[Array, "*B C K"],
    g: Float[Array, "*B C D"] | None,
    *,
    strict: bool,
    precision: jax.lax.Precision | None,
) -> Float[Array, "*B C C"]:
    """`P(x, y)_ij = x_i Diag(exp(b_i - b_j)) y_j^T` for `j <= i`, or `j < i` if `strict`."""
    C = x.shape[-2]
    mask = np.tri(C, k=-1 if strict else 0, dtype=bool)
    if g is not None and g.shape[-1] != 1:
        products = _vector_scores(x, y, g, precision)
    else:
        products = _gram(x, precision) if x is y else dot("...ik,...jk->...ij", x, y, precision)
        if g is not None:
            # Entries above the diagonal are sums over empty ranges, so no exponent is positive.
            products = products * jnp.exp(_pairwise_sums(g[..., 0]))
    return jnp.where(mask, products, 0)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _gram(k: Float[Array, "*B C K"], precision: jax.lax.Precision | None) -> Float[Array, "*B C C"]:
    """`k k^T` as a sum of products over shares of the channels.

    Its rounding errors are several times smaller than those of one long sum. With one key for
    all tokens every entry of the system has the same error, and a chunk repeats it C times.
    """
    shares = jnp.array_split(k, min(SHARES, k.shape[-1]), axis=-1)
    first, *others = (dot("...ik,...jk->...ij", x, x, precision) for x in shares)
    return sum(others, start=first)


@_gram.defjvp
def _gram_jvp(
    precision: jax.lax.Precision | None, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`dk k^T` and its transpose: one product, and one in reverse mode."""
    half = dot("...ik,...jk->...ij", tangents[0], primals[0], precision)
    return _gram(primals[0], precision), half + jnp.swapaxes(half, -1, -2)


def _range_sums(ranges: np.ndarray, g: Float[Array, "*B C D"]) -> Float[Array, "*B N D"]:
    """Sums of `g` over the tokens that each row of the 0/1 matrix `ranges` selects."""
    constant = jnp.asarray(ranges, g.dtype)
    return jnp.einsum("ij,...jd->...id", constant, g, precision=jax.lax.Precision.HIGHEST)


def _pairwise_sums(g: Float[Array, "*B C"]) -> Float[Array, "*B C C"]:
    """`sum_{j < l <= i} g_l` for all pairs (i, j); 0 on and above the diagonal."""
    C = g.shape[-1]
    after = np.tri(C, k=-1, dtype=bool)  # [l, j]: l > j
    terms = jnp.where(after, g[..., :, None], 0)
    return _range_sums(np.tri(C), terms)


def _vector_scores(
    x: Float[Array, "*B C K"],
    y: Float[Array, "*B C K"],
    g: Float[Array, "*B C K"],
    precision: jax.lax.Precision | None,
) -> Float[Array, "*B C C"]:
    """`P(x, y)` with a decay per key channel; only entries with `j <= i` mean something.

    Rows are cut into sub-blocks. Between sub-blocks the decay factors at the first row of
    the later one, and both factors are at most 1; inside a sub-block it is formed per pair.
    """
    *batch, C, K = x.shape
    size = max(d for d in range(1, min(SUB_BLOCK, C) + 1) if C % d == 0)
    blocks = (*batch, C // size, size, K)
    x, y = x.astype(g.dtype), y.astype(g.dtype)
    xb, gb = x.reshape(blocks), g.reshape(blocks)
    inside = _pair_scores(xb, y.reshape(blocks), gb)

    row_start, row_block = np.arange(0, C, size)[:, None], np.arange(C) // size
    column, token = np.arange(C)[None, :, None], np.arange(C)[None, None, :]
    to_block = (token > column) & (token < row_start[..., None])  # [I, j, l]
    earlier = np.arange(C)[None, :] < row_start  # [I, j]
    decay_to_block = jnp.exp(_range_sums(to_block.reshape(-1, C), g)).reshape(
        *batch, C // size, C, K
    )
    from_block = jnp.exp(_range_sums(np.tri(size), gb))
    reaching = jnp.where(earlier[..., None], y[..., None, :, :] * decay_to_block, 0)
    between = dot("...Iik,...Ijk->...Iij", xb * from_block, reaching, precision)

    same = row_block[:, None] == row_block[None, :]
    spread = jnp.tile(inside.reshape(*batch, C, size), C // size)
    return jnp.where(same, spread, between.reshape(*batch, C, C))


def _pair_scores(
    x: Float[Array, "*M size K"], y: Float[Array, "*M size K"], g: Float[Array, "*M size K"]
) -> Float[Array, "*M size size"]:
    """Compute `P(x, y)` inside sub-blocks, the decay formed for each pair of rows.

    Rows are spread over pairs, and pairs summed, by products with ones. Broadcasts and sums over
    arrays of rank 7 or more, which `vmap` makes of any rank, crash the CPU compiler of jaxlib
    0.10.2.
    """
    size, K = x.shape[-2:]
    rows, channels = jnp.ones(size, g.dtype), jnp.ones(K, g.dtype)
    spread = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    pairs = jnp.exp(_pairwise_sums(jnp.swapaxes(g, -1, -2)))  # [..., K, i, j]
    decayed = jnp.moveaxis(pairs, -3, -1) * spread("...ik,j->...ijk", x, rows)
    products = decayed * spread("...jk,i->...ijk", y, rows)
    return spread("...ijk,k->...ij", products, channels)
