"""Three ways to hold sequences of different lengths, and the ways between them.

*Offsets* `cu_seqlens [N+1]` and *ids* `segment_ids [1, T]` describe one row that holds all
sequences one after another; a *padded batch* `[N, L, ...]` has one row for each. Offsets keep
sequences without tokens; ids cannot.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from deltanet_jax.core import checks
from deltanet_jax.ops.canonical import canonical_offsets

__all__ = [
    "cu_seqlens_to_segment_ids",
    "lengths_to_cu_seqlens",
    "pack_padded",
    "pad_packed",
    "segment_ids_to_cu_seqlens",
]


def lengths_to_cu_seqlens(lengths: Int[Array, " N"]) -> Int[Array, " N+1"]:
    """Offsets of sequences of these lengths.

    Raises:
        ValueError: If `lengths` is not an integer array `[N]`, or holds a negative number.

    Example:
        >>> lengths_to_cu_seqlens(jnp.asarray([2, 0, 3])).tolist()
        [0, 2, 2, 5]
    """
    lengths = checks.integers("lengths", lengths, "[N]")
    if not isinstance(lengths, jax.core.Tracer) and bool(jnp.any(lengths < 0)):
        raise ValueError(f"`lengths` must be >= 0; got {int(jnp.min(lengths))}")
    return jnp.pad(jnp.cumsum(lengths), (1, 0))


def cu_seqlens_to_segment_ids(cu_seqlens: Int[Array, " N+1"], total: int) -> Int[Array, "1 T"]:
    """The number of the sequence that each of `total` tokens belongs to.

    Raises:
        ValueError: If `cu_seqlens` is not an integer array `[N+1]`, or its values are known and
            do not rise from 0 to `total`.

    Example:
        >>> cu_seqlens_to_segment_ids(jnp.asarray([0, 2, 2, 5]), total=5).tolist()
        [[0, 0, 2, 2, 2]]
    """
    total = checks.whole("total", total, least=0)
    ends = canonical_offsets(cu_seqlens, total)[1:]
    return jnp.searchsorted(ends, jnp.arange(total), side="right").astype(jnp.int32)[None]


def segment_ids_to_cu_seqlens(
    segment_ids: Int[Array, "1 T"], num_sequences: int | None = None
) -> Int[Array, " N+1"]:
    """Offsets of the runs of equal ids.

    Args:
        segment_ids: Integers of one row.
        num_sequences: `N`, which must be known at trace time; the number of runs where the ids
            are concrete. Beyond the runs there are sequences without tokens.

    Raises:
        ValueError: If `segment_ids` is not an integer array `[1, T]`; if there are more runs
            than `num_sequences`, or their number is neither given nor known.

    Example:
        >>> segment_ids_to_cu_seqlens(jnp.asarray([[7, 7, 4, 4, 4]])).tolist()
        [0, 2, 5]
    """
    ids = checks.integers("segment_ids", segment_ids, "[1, T]")
    if ids.shape[0] != 1:
        raise ValueError(f"`segment_ids` must have shape [1, T]; got {ids.shape}")
    T = ids.shape[1]
    if num_sequences is not None:
        num_sequences = checks.whole("num_sequences", num_sequences, least=1)
    new = ids[0, 1:] != ids[0, :-1]
    if not isinstance(ids, jax.core.Tracer):
        runs = int(jnp.sum(new)) + (T > 0)
        num_sequences = max(1, runs) if num_sequences is None else num_sequences
        if runs > num_sequences:
            raise ValueError(
                f"`num_sequences` must be at least the number of runs, {runs}; got {num_sequences}"
            )
    if num_sequences is None:
        raise ValueError("`num_sequences` must be a positive integer under `jit`; got None")
    (starts,) = jnp.nonzero(new, size=num_sequences - 1, fill_value=T - 1)
    return jnp.concatenate([jnp.zeros(1, starts.dtype), starts + 1, jnp.full(1, T, starts.dtype)])


def pad_packed(
    x: Array, cu_seqlens: Int[Array, " N+1"], max_length: int
) -> tuple[Array, Bool[Array, "N L"]]:
    """A row `[1, T, ...]` as a batch `[N, max_length, ...]` padded with zeros, and its mask.

    Raises:
        ValueError: If an argument has the wrong shape, or the values of `cu_seqlens` are known
            and wrong, or a sequence is longer than `max_length` (under `jit` it is cut off).

    Example:
        >>> batch, mask = pad_packed(jnp.arange(5)[None], jnp.asarray([0, 2, 5]), max_length=3)
        >>> batch.tolist(), mask.tolist()
        ([[0, 1, 0], [2, 3, 4]], [[True, True, False], [True, True, True]])
    """
    if x.ndim < 2 or x.shape[0] != 1:
        raise ValueError(f"`x` must have shape [1, T, ...]; got {x.shape}")
    max_length = checks.whole("max_length", max_length, least=0)
    offsets = canonical_offsets(cu_seqlens, x.shape[1])
    lengths = offsets[1:] - offsets[:-1]
    _check_longest(lengths, max_length)
    place = jnp.arange(max_length)[None]
    mask = place < lengths[:, None]
    tokens = jnp.where(mask, offsets[:-1, None] + place, x.shape[1])
    return x[0].at[tokens].get(mode="fill", fill_value=0), mask


def pack_padded(x: Array, cu_seqlens: Int[Array, " N+1"], total: int | None = None) -> Array:
    """The inverse of `pad_packed`: a right-padded batch `[N, L, ...]` as a row `[1, T, ...]`.

    Args:
        x: The batch.
        cu_seqlens: Offsets in the row; `lengths_to_cu_seqlens(mask.sum(1))` of a mask.
        total: `T`, which must be known at trace time; the last offset where it is concrete.

    Raises:
        ValueError: If shapes or values disagree, or `total` is neither given nor known.

    Example:
        >>> pack_padded(jnp.asarray([[0, 1, 0], [2, 3, 4]]), jnp.asarray([0, 2, 5])).tolist()
        [[0, 1, 2, 3, 4]]
    """
    if total is None:
        if isinstance(cu_seqlens, jax.core.Tracer):
            raise ValueError("`total` must be given under `jit`; got None")
        total = int(canonical_offsets(cu_seqlens, None)[-1])
    total = checks.whole("total", total, least=0)
    offsets = canonical_offsets(cu_seqlens, total)
    N = offsets.shape[0] - 1
    if x.ndim < 2 or x.shape[0] != N:
        raise ValueError(f"`x` must have shape [N, L, ...] with N = {N}; got {x.shape}")
    _check_longest(offsets[1:] - offsets[:-1], x.shape[1])
    token = jnp.arange(total)
    row = jnp.searchsorted(offsets[1:], token, side="right")
    return x[row, token - offsets[row]][None]


def _check_longest(lengths: jax.Array, longest: int) -> None:
    if not isinstance(lengths, jax.core.Tracer) and int(jnp.max(lengths)) > longest:
        raise ValueError(
            f"no sequence may be longer than {longest} tokens here; "
            f"`cu_seqlens` has one of {int(jnp.max(lengths))}"
        )
