"""Bytes of real text, and batches of them that are a function of seed and step alone."""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.record import Run
from experiments.tasks.corpus import Corpus

__all__ = [
    "Text",
    "batch",
    "documents",
    "note_text",
    "read_shuffled",
    "read_text",
    "standard_library",
]


@dataclass(frozen=True)
class Text:
    """Bytes, and where they come from."""

    data: np.ndarray  # uint8
    source: str
    sha256: str


def standard_library() -> list[Path]:
    """The source files of the running Python's standard library, by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(root.glob("*.py"))


def read_text(files: Sequence[Path] = (), limit: int | None = None) -> Text:
    """The files' bytes in the order given, at most `limit`; the standard library by default.

    Raises:
        ValueError: If there is nothing to read.
    """
    paths = list(files) or standard_library()
    data = bytearray()
    for path in paths:
        data += path.read_bytes()
        if limit is not None and len(data) >= limit:
            break
    kept = bytes(data[:limit])
    if not kept:
        raise ValueError(f"no text in {[str(path) for path in paths]}")
    source = ", ".join(str(path) for path in files) if files else "Python standard library source"
    array = np.frombuffer(kept, np.uint8)
    return Text(array, source, hashlib.sha256(kept).hexdigest())


def documents(paths: Sequence[Path], *, beside: Path | None = None) -> Iterator[np.ndarray]:
    """Read the bytes of every file, those of a directory by name; leave out those in `beside`."""
    left_out = None if beside is None else beside.resolve()
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if left_out is None or left_out not in file.resolve().parents:
                yield np.frombuffer(file.read_bytes(), np.uint8)


def read_shuffled(paths: Sequence[Path], limit: int) -> Text:
    """Documents in a fixed random order, one after another, at most `limit` bytes of them.

    Args:
        paths: Files, directories of files, and corpora of bytes (`write_corpus`), of which no
            more is read than is used; by default the standard library.
        limit: Bytes; the last document may be cut.

    Raises:
        ValueError: If a corpus holds something else than bytes.
    """
    found: list[np.ndarray] = []
    for path in paths or standard_library():
        if (path / "corpus.json").exists():
            corpus = Corpus.open(path, 1)
            if corpus.largest > 255:
                raise ValueError(f"`text` must hold bytes; {path} holds {corpus.largest}")
            found += np.split(corpus.tokens, np.asarray(corpus.ends[:-1]))  # views of the map
        else:
            found += documents((path,))
    parts, left = [], limit
    for index in np.random.default_rng(0).permutation(len(found)):
        parts.append(np.asarray(found[index][:left], np.uint8))
        left -= len(parts[-1])
    data = np.concatenate(parts)
    source = ", ".join(map(str, paths)) or "Python standard library source"
    return Text(data, source, hashlib.sha256(data.tobytes()).hexdigest())


def batch(text: Text, *, seed: int, step: int, batch_size: int, length: int) -> np.ndarray:
    """Windows of `length` bytes at random places, int32 `[batch_size, length]`.

    Raises:
        ValueError: If the text is shorter than one window.
    """
    last = len(text.data) - length
    if last < 0:
        raise ValueError(f"the text has {len(text.data)} bytes; a window takes {length}")
    starts = np.random.default_rng([seed, step]).integers(0, last + 1, batch_size)
    return text.data[starts[:, None] + np.arange(length)].astype(np.int32)


def note_text(record: Run, text: Text) -> None:
    """Note in the record what text is trained on.

    Raises:
        ValueError: If a run that is continued finds other bytes.
    """
    noted = record.find(kind="text")
    if noted is None:
        record.write({"kind": "text", "source": text.source, "bytes": len(text.data),
                      "sha256": text.sha256})  # fmt: skip
    elif noted["sha256"] != text.sha256:
        raise ValueError("the text is not the one this run started with; start a new run")
