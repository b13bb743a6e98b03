"""The implementations that the ablation measures, and how it names and draws them.

Every implementation of the library is measured. One that has no row here gets the defaults, so
a new one needs no edit.
"""

from itertools import cycle
from typing import NamedTuple

from deltanet_jax.ops import dispatch

__all__ = ["CHUNKED", "IMPLEMENTATIONS", "Entry"]


class Entry(NamedTuple):
    """One label of the record."""

    name: str  # in the library
    chunk_size: int | None  # None: over tokens
    label: str  # in figures
    short: str  # in tables: a terminal of 80 columns leaves this much for a name
    color: str
    marker: str


KNOWN = {
    "recurrent": Entry("recurrent", None, "recurrent", "recurrent", "black", "o"),
    "associative": Entry("associative", None, "associative (tokens)", "assoc.", "red", "s"),
    "associative_chunked": Entry(
        "associative", 64, "associative (chunks)", "assoc./chunks", "orange", "D"
    ),
    "chunkwise": Entry("chunkwise", 64, "chunkwise (WY)", "chunk WY", "blue", "^"),
    "chunkwise_solve": Entry("chunkwise_solve", 64, "chunkwise (solve)", "chunk solve", "sky", "v"),
    "pallas": Entry("pallas", 64, "Pallas kernel", "pallas", "green", "P"),
}
OTHER_LOOKS = cycle([("pink", "X"), ("grey", "h"), ("orange", "<"), ("blue", ">")])
IMPLEMENTATIONS = KNOWN | {
    name: Entry(name, 64, name, name[:13], *next(OTHER_LOOKS))
    for name in dispatch.IMPLEMENTATIONS
    if name not in KNOWN
}
CHUNKED = tuple(name for name, entry in IMPLEMENTATIONS.items() if entry.chunk_size is not None)
