"""Few heads and long rows: pieces of the sequence in parallel, exactly.

Over a piece the state obeys `S' = M S + R`, and its gradient `G = M^T G' + H`. One pass finds
the maps of all pieces, a short loop chains them, and then every piece runs on its own.
"""

from typing import Any

import jax
import jax.numpy as jnp

from deltanet_jax.kernels.mosaic_gpu.chain_pieces import chain_pieces
from deltanet_jax.kernels.mosaic_gpu.tuning import sm_count

__all__ = ["chain", "fold", "pieces_of", "terms_of", "unfold"]


# The pass over the maps costs about twice the forward; fewer pieces would not pay for it.
FEWEST = 8
SHORTEST = 16  # chunks
CHAINED = (64, 128)  # K for which a kernel chains the pieces


def pieces_of(batch: int, chunks: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Choose the number of pieces to cut each sequence into; 1 where heads fill the GPU."""
    width = 128 if key_dim <= 128 else 64
    programs = batch * heads * max(1, value_dim // width)
    pieces = 1
    while 2 * pieces * programs <= sm_count() and chunks >= 2 * pieces * SHORTEST:
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


def terms_of(maps: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays whose sum is `maps`, for `chain`: itself, or a split bfloat16 pair for K <= 128.

    The pair keeps 16 bits of mantissa, in the same memory.
    """
    if maps.shape[-1] not in CHAINED:
        return (maps,)
    # A cast there and back is one that the compiler may leave out.
    high = jax.lax.reduce_precision(maps, exponent_bits=8, mantissa_bits=7)
    return high.astype(jnp.bfloat16), (maps - high).astype(jnp.bfloat16)


def chain(
    first: jax.Array,
    maps: tuple[jax.Array, ...],
    offsets: jax.Array,
    pieces: int,
    *,
    reverse: bool,
    interpret: Any = None,
) -> jax.Array:
    """Return the state that enters every piece, folded, from that of the first (last if `reverse`).

    `maps`, the `terms_of` `[B * P, H, K, K]`, and `offsets`, the first V columns of
    `[B * P, H, K, V...]`, are those of `x -> M x + R`, or of `x -> M^T x + R` if `reverse`.
    """
    if len(maps) > 1:
        return chain_pieces(first, maps, offsets, pieces, reverse=reverse, interpret=interpret)
    offsets = offsets[..., : first.shape[-1]]
    whole, offsets = (x.reshape(-1, pieces, *x.shape[1:]) for x in (*maps, offsets))
    equation = "bhkl,bhkv->bhlv" if reverse else "bhlk,bhkv->bhlv"
    exact = jax.lax.Precision.HIGHEST
    order = range(pieces - 1, 0, -1) if reverse else range(pieces - 1)
    entering = [first]
    for p in order:
        moved = jnp.einsum(equation, whole[:, p], entering[-1], precision=exact)
        entering.append(moved + offsets[:, p])
    if reverse:
        entering.reverse()
    return jnp.stack(entering, axis=1).reshape(-1, *first.shape[1:])
