"""Write files as a corpus of bytes that is mapped into memory, and not read into it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from experiments.tables import console
from experiments.tasks.corpus import write_corpus
from experiments.tasks.text import standard_library

__all__ = ["PackText", "run"]


@dataclass(frozen=True)
class PackText:
    """Files, each a document of bytes, as a corpus for `train-sharded --corpus`."""

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Where the corpus goes."""
    files: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE...")] = ()
    """The documents, or directories of them; by default this Python's standard library."""


def run(options: PackText) -> int:
    """Write the corpus; the number of its tokens."""
    total = write_corpus(options.out, documents(options.files or tuple(standard_library())))
    console.print(f"{total:,} tokens in {options.out}")
    return total


def documents(paths: tuple[Path, ...]) -> Iterator[np.ndarray]:
    """The bytes of every file, those of a directory by name."""
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            yield np.frombuffer(file.read_bytes(), np.uint8)
