"""Checksums of arrays that may be spread over many devices and processes.

::

    sum_i bits(x)_i prod_d w_d(i_d)  mod 2^32,  all w odd

One flipped bit always changes it. Parts add up, so it does not depend on how an array is sharded.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["checksums"]


def checksums(tree: Any) -> dict[str, int]:
    """Return the checksum of every array of a tree, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = np.array([_here(x) for _, x in leaves], np.uint32)
    if jax.process_count() > 1:
        sums = np.asarray(multihost_utils.process_allgather(sums)).sum(0, dtype=np.uint32)
    return {jax.tree_util.keystr(path): int(x) for (path, _), x in zip(leaves, sums, strict=True)}


def _here(x: jax.Array) -> int:
    """Sum over the parts of this process; of equal parts on several devices, over one."""
    parts = (part for part in x.addressable_shards if part.replica_id == 0)
    return sum(_of_part(np.asarray(part.data), part.index) for part in parts) % 2**32


def _of_part(data: np.ndarray, index: tuple[slice, ...]) -> int:
    starts = [axis.start or 0 for axis in index]
    size = min(data.itemsize, 4)  # a wider number is several of 32 bits
    words = np.ascontiguousarray(data).reshape(*data.shape, 1).view(f"u{size}")
    for start in (0, *reversed(starts)):
        words = words.astype(np.uint32, copy=False) @ _weights(start, words.shape[-1])
    return int(words)


def _weights(start: int, count: int) -> np.ndarray:
    places = np.arange(start, start + count, dtype=np.uint64)
    return ((places * np.uint64(2654435761)) | np.uint64(1)).astype(np.uint32)
