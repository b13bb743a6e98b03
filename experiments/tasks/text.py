"""Bytes of real text, and batches of them that are a function of seed and step alone."""

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Text", "batch", "read_text", "standard_library"]


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
