"""Write files as a corpus of bytes that is mapped into memory, and not read into it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from experiments.tables import console
from experiments.tasks.corpus import write_corpus
from experiments.tasks.text import documents, standard_library

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
    files = options.files or tuple(standard_library())
    total = write_corpus(options.out, documents(files, beside=options.out))
    console.print(f"{total:,} tokens in {options.out}")
    return total
