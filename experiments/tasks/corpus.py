"""Tokens on disk, larger than memory, as packed batches that (seed, step) alone decides.

A corpus is a directory of `tokens.bin`, all documents after one another, and `ends.bin`, where
each of them ends. It is cut into windows of `T` tokens; an epoch reads every window once, in an
order that is computed and not stored. A window may hold parts of several documents: their
`segment_ids` keep them apart. Batch `n` needs none of those before it, so a run that was killed
continues at its step, and each of many processes can read its own rows.
"""

import json
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int

__all__ = ["Corpus", "PackedBatch", "prefetch", "shuffled", "write_corpus"]

Batch = TypeVar("Batch")

ROUNDS = 6  # of the Feistel network; four already pass for random


class PackedBatch(NamedTuple):
    """Rows of tokens, and the number of the document that each token is from."""

    tokens: Int[np.ndarray, "B T"]
    segment_ids: Int[np.ndarray, "B T"]


def write_corpus(
    directory: Path, documents: Iterable[Int[np.ndarray, " N"]], *, dtype: str = "uint8"
) -> int:
    """Write documents one at a time; the number of tokens.

    Raises:
        ValueError: If a token does not fit the dtype, or there is no token at all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Beside the files of a corpus that a run may have mapped, which keeps those it has.
    paths = [directory / f"{name}.unfinished" for name in ("tokens.bin", "ends.bin")]
    limit, total, largest = np.iinfo(dtype).max, 0, 0
    with paths[0].open("wb") as tokens, paths[1].open("wb") as ends:
        for document in documents:
            document = np.asarray(document)
            if document.size and not 0 <= document.min() <= document.max() <= limit:
                raise ValueError(
                    f"tokens must be in [0, {limit}] for dtype={dtype!r}; "
                    f"got {document.min()} to {document.max()}"
                )
            tokens.write(document.astype(dtype).tobytes())
            total += document.size
            largest = max(largest, int(document.max(initial=0)))
            ends.write(np.int64(total).tobytes())
    if total == 0:
        raise ValueError(f"`documents` must hold tokens; got none for {directory}")
    about = {"dtype": dtype, "tokens": total, "largest": largest}
    about["ends_crc32"] = zlib.crc32(paths[1].read_bytes())
    described = directory / "corpus.json"
    # A directory without it is not a corpus: it goes first and comes last.
    described.unlink(missing_ok=True)
    for path in paths:
        path.replace(path.with_suffix(""))
    unfinished = directory / "corpus.json.unfinished"
    unfinished.write_text(json.dumps(about) + "\n")
    unfinished.replace(described)
    return total


@dataclass(frozen=True)
class Corpus:
    """Windows of a memory-mapped corpus; a source for random access (`len` and `[i]`)."""

    tokens: np.ndarray
    ends: Int[np.ndarray, " D"]
    length: int
    """`T`, tokens per window."""
    largest: int
    """The largest token of the corpus; a vocabulary must have more."""

    @classmethod
    def open(cls, directory: Path, length: int) -> "Corpus":
        """Map a corpus; nothing is read until a window is asked for.

        Raises:
            ValueError: If there is no whole corpus, or it is shorter than one window.
        """
        path = directory / "corpus.json"
        if not path.exists():
            raise ValueError(f"{directory} is not a corpus: it has no corpus.json")
        about = _description(path)
        if not (directory / "tokens.bin").stat().st_size:
            raise ValueError(f"{directory} is a damaged corpus: tokens.bin is empty")
        tokens = np.memmap(directory / "tokens.bin", about["dtype"], mode="r")
        if len(tokens) != about["tokens"]:
            raise ValueError(f"{directory} must hold {about['tokens']} tokens; got {len(tokens)}")
        if not 0 < length <= len(tokens):
            raise ValueError(f"`length` must be in [1, {len(tokens)}]; got {length}")
        size = (directory / "ends.bin").stat().st_size
        if size == 0 or size % np.dtype(np.int64).itemsize:
            raise ValueError(f"{directory} is a damaged corpus: ends.bin has {size} bytes")
        ends = np.memmap(directory / "ends.bin", np.int64, mode="r")
        _check_ends(directory, ends, about)
        return cls(tokens, ends, length, about["largest"])

    def __len__(self) -> int:
        """How many whole windows there are."""
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> PackedBatch:
        """One window, without the axis of rows."""
        return PackedBatch(*(x[0] for x in self.windows(np.asarray([index]))))

    def windows(self, indices: Int[np.ndarray, " B"]) -> PackedBatch:
        """These windows as rows; documents are numbered from 0 in each row."""
        places = indices[:, None].astype(np.int64) * self.length + np.arange(self.length)
        documents = np.searchsorted(self.ends, places, side="right")
        ids = documents - documents[:, :1]
        tokens = self.tokens[places]
        if tokens.size and not 0 <= tokens.min() <= tokens.max() <= self.largest:
            raise ValueError(
                f"the corpus is damaged: its tokens must be in [0, {self.largest}]; "
                f"got {tokens.min()} to {tokens.max()}"
            )
        return PackedBatch(tokens.astype(np.int32), ids.astype(np.int32))

    def batch(self, *, seed: int, step: int, batch_size: int) -> PackedBatch:
        """The rows of a step: the next `batch_size` windows of the epochs' orders."""
        positions = step * batch_size + np.arange(batch_size)
        epochs, places = np.divmod(positions, len(self))
        indices = np.empty(batch_size, np.int64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            indices[mine] = shuffled(places[mine], len(self), (seed, int(epoch)))
        return self.windows(indices)


def _description(path: Path) -> dict[str, Any]:
    """Read corpus.json and check what it says."""
    try:
        about = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    wanted = {"dtype": str, "tokens": int, "largest": int}
    if not isinstance(about, dict) or any(
        not isinstance(about.get(name), kind) for name, kind in wanted.items()
    ):
        raise ValueError(f"{path} is damaged: it must hold {', '.join(wanted)}")
    kind = np.dtype(about["dtype"]) if about["dtype"] in np.sctypeDict else None
    if kind is None or kind.kind not in "iu":
        raise ValueError(f"{path} must name an integer dtype; got {about['dtype']!r}")
    if not 0 <= about["largest"] <= np.iinfo(np.int32).max:
        raise ValueError(f"{path} must have `largest` in 31 bits; got {about['largest']}")
    return about


def _check_ends(directory: Path, ends: Int[np.ndarray, " D"], about: dict[str, Any]) -> None:
    """Refuse ends of documents that are damaged, or those of another corpus."""
    wrong = None
    if ends[-1] != about["tokens"]:
        wrong = f"the last of its ends must be {about['tokens']}"
    elif ends[0] < 0 or np.any(np.diff(ends) < 0):
        wrong = "its ends must rise from 0"
    elif about.get("ends_crc32", zlib.crc32(ends.tobytes())) != zlib.crc32(ends.tobytes()):
        wrong = "its ends do not have their checksum"
    if wrong is not None:
        raise ValueError(f"{directory} is a damaged corpus: {wrong}")


def shuffled(
    places: Int[np.ndarray, " N"], size: int, seed: tuple[int, ...]
) -> Int[np.ndarray, " N"]:
    """Where these places of `range(size)` go in a pseudo-random permutation of it.

    A Feistel network permutes the numbers of `2 b` bits; one that leaves the range is sent
    through again until it is back (cycle walking), at most four times on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64(2**half - 1)
    keys = np.random.default_rng(seed).integers(0, 2**63, ROUNDS, np.uint64)

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> np.uint64(half), x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return (left << np.uint64(half)) | right

    x = once(np.asarray(places).astype(np.uint64))
    while (outside := x >= size).any():
        x[outside] = once(x[outside])
    return x.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al., 2014); products wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def prefetch(make: Callable[[int], Batch], steps: Iterable[int], depth: int = 2) -> Iterator[Batch]:
    """`make(step)` for every step in order, up to `depth` of them made ahead by a thread.

    An error in `make` is raised where its batch would have been; a consumer that stops early
    (or closes the generator) stops the thread.
    """
    ready: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(max(1, depth))
    stop = threading.Event()

    def put(item: tuple[Batch | None, BaseException | None]) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for step in steps:
                if stop.is_set():
                    return
                put((make(step), None))
            put((None, StopIteration()))
        except BaseException as error:  # handed to the consumer, whatever it is
            put((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            batch, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield batch  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()
