"""Predict the cost of each algorithm from its algebra.

XLA's own count cannot be used here: it counts the body of a loop once.
"""

import math
from typing import NamedTuple

__all__ = ["Cost", "Sizes", "predict"]


class Sizes(NamedTuple):
    """One call: `B` sequences of `T` tokens, `H` heads of `K` and `V` channels, chunks of `C`."""

    B: int
    T: int
    H: int
    K: int
    V: int
    C: int
    itemsize: int = 4  # of q, k, v


class Cost(NamedTuple):
    """Predicted cost; one multiply-add is two FLOPs."""

    flops: float
    bytes_moved: float
    temporary_bytes: float
    serial_steps: int


def predict(implementation: str, sizes: Sizes, *, backward: bool) -> Cost:
    """FLOPs, bytes and memory of one call of the delta rule.

    Forward, per token and head (`N = T/C` chunks; float32 between the steps)::

        recurrent            6 K V                        k S, the write, q S
        associative          2 (2 K^3 + 2 K^2 V) + 2 K^2 V + 2 K V
                             about two compositions a token, then the state, then q S
        associative_chunked  WY + 2 K^2 + (2 (2 K^3 + 2 K^2 V) + 2 K^2 V) / C
        chunkwise            WY = C (4 K + (K + V) + 2 V) + 6 K V
                             k k^T and q k^T, the solve of [W | U], the inner product, three
                             products with the state
        chunkwise_solve      C (4 K + V + 2 V) + 6 K V

    An implementation that is not listed is predicted as `chunkwise`.

    Bytes: every form reads q, k, v and writes o. On top the recurrence reads and writes the
    state once a token; a composition reads two maps `[K, K + V]` and writes one; the chunk
    forms write and read their factors and scores, and one state a chunk.

    The backward pass costs twice the forward; the forms that recompute pay the forward once
    more. Memory is the largest set of arrays alive together, to a factor of about two: maps of
    all tokens 2.5 times for a scan over tokens and 8 times with its gradient; for the others
    the re-arranged inputs and outputs, the states they keep, and one block's work.
    """
    B, T, H, K, V, C, _ = sizes
    tokens = B * T * H
    flops = _flops(implementation, sizes) * tokens
    moved = (2 * K + 2 * V) * sizes.itemsize + 4 * _floats_moved(implementation, sizes)
    if backward:
        recomputes = not implementation.startswith("associative")
        flops, moved = (x * (4 if recomputes else 3) for x in (flops, moved))
    steps = {
        "recurrent": T,
        "associative": 2 * math.ceil(math.log2(max(T, 2))),
        "associative_chunked": 2 * math.ceil(math.log2(max(T // C, 2))),
    }.get(implementation, -(-T // C))
    memory = 4 * B * H * _live_floats(implementation, sizes, backward=backward)
    return Cost(flops, moved * tokens, memory, steps * (2 if backward else 1))


def _flops(implementation: str, sizes: Sizes) -> float:
    K, V, C = sizes.K, sizes.V, sizes.C
    compose, wy = 4 * K**3 + 4 * K**2 * V + 2 * K**2 * V, C * (5 * K + 3 * V) + 6 * K * V
    match implementation:
        case "recurrent":
            return 6 * K * V
        case "associative":
            return compose + 2 * K * V
        case "associative_chunked":
            return wy + 2 * K**2 + compose / C
        case "chunkwise_solve":
            return C * (4 * K + 3 * V) + 6 * K * V
    return wy


def _floats_moved(implementation: str, sizes: Sizes) -> float:
    K, V, C = sizes.K, sizes.V, sizes.C
    maps, factors = K * (K + V), 2 * (K + V) + 4 * C
    match implementation:
        case "recurrent":
            return 2 * K * V
        case "associative":
            return 2 * 3 * maps + 2 * K * V
        case "associative_chunked":
            return factors + (2 * 3 * maps + 2 * K * V) / C
        case "pallas":
            return 2 * K * V / C
        case "chunkwise_solve":
            return 2 * V + 4 * C + 2 * K * V / C
    return factors + 2 * K * V / C


def _live_floats(implementation: str, sizes: Sizes, *, backward: bool) -> float:
    """Floats alive together, per sequence and head."""
    _, T, _, K, V, C, _ = sizes
    arranged = T * (2 * K + 2 * V) * (2 if backward else 1)
    block = min(T, 512)
    match implementation:
        case "recurrent":
            return arranged + (2 * math.isqrt(T) * K * V if backward else 0)
        case "associative":
            return (8 if backward else 2.5) * T * K * (K + V)
        case "associative_chunked":
            maps = (T / C) * K * (K + V)
            return arranged + (8 if backward else 2.5) * maps + T * (K + V + 2 * C)
        case "pallas":
            return arranged + (T / C) * K * V * (1 if backward else 0)
        case "chunkwise_solve":
            return arranged + (T / C) * K * V * (1 if backward else 0) + 6 * C * C
    work = block * (3 * (K + V) + 3 * C) + (block / C) * K * V
    return arranged + work * (3 if backward else 1)
