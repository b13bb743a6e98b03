"""Few heads and long rows: pieces of the sequence in parallel, exactly.

Over a piece the state obeys `S' = M S + R`, and its cotangent `G = M^T G' + H`. One pass finds
the maps of all pieces, a short loop chains them, and then every piece runs on its own.
"""

import jax
import jax.numpy as jnp

from deltanet_jax.kernels.mosaic_gpu.support import MULTIPROCESSORS

__all__ = ["chain", "fold", "pieces_of", "unfold"]


# The pass over the maps costs about twice the forward; fewer pieces would not pay for it.
FEWEST = 8
SHORTEST = 16  # chunks


def pieces_of(batch: int, chunks: int, heads: int, key_dim: int, value_dim: int) -> int:
    """How many pieces to cut each sequence into; 1 where heads fill the GPU."""
    width = 128 if key_dim <= 128 else 64
    programs = batch * heads * max(1, value_dim // width)
    pieces = 1
    while 2 * pieces * programs <= MULTIPROCESSORS and chunks >= 2 * pieces * SHORTEST:
        pieces *= 2
    return pieces if pieces >= FEWEST else 1


def fold(x: jax.Array | None, pieces: int) -> jax.Array | None:
    """`[B, T, ...]` as `[B * P, T / P, ...]`, for tokens or chunks."""
    if x is None or pieces == 1:
        return x
    B, T, *rest = x.shape
    return x.reshape(B * pieces, T // pieces, *rest)


def unfold(x: jax.Array | None, pieces: int) -> jax.Array | None:
    """Inverse of `fold`."""
    if x is None or pieces == 1:
        return x
    BP, T, *rest = x.shape
    return x.reshape(BP // pieces, T * pieces, *rest)


def chain(
    first: jax.Array, maps: jax.Array, offsets: jax.Array, pieces: int, *, reverse: bool
) -> jax.Array:
    """What enters every piece, folded, from what enters the first one (the last if `reverse`).

    `maps` `[B * P, H, K, K]` and `offsets` `[B * P, H, K, V]` are those of `x -> M x + R`, or of
    `x -> M^T x + R` if `reverse`.
    """
    maps, offsets = (x.reshape(-1, pieces, *x.shape[1:]) for x in (maps, offsets))
    equation = "bhkl,bhkv->bhlv" if reverse else "bhlk,bhkv->bhlv"
    exact = jax.lax.Precision.HIGHEST
    order = range(pieces - 1, 0, -1) if reverse else range(pieces - 1)
    entering = [first]
    for p in order:
        moved = jnp.einsum(equation, maps[:, p], entering[-1], precision=exact)
        entering.append(moved + offsets[:, p])
    if reverse:
        entering.reverse()
    return jnp.stack(entering, axis=1).reshape(-1, *first.shape[1:])
