"""The state of a training run on disk, bit for bit."""

import zlib
from pathlib import Path
from typing import TypeVar
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["load", "save"]

Tree = TypeVar("Tree")


def save(path: Path, state: object, step: int) -> None:
    """The state after `step` steps, bit for bit; the file is the old or the new one, whole."""
    leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez(file, step=step, **leaves)
    part.replace(path)


def load(path: Path, state: Tree) -> tuple[Tree, int]:
    """The state of a checkpoint and its number of steps; `state` itself if there is none.

    Raises:
        ValueError: If the file is damaged, or of another state.
    """
    if not path.exists():
        return state, 0
    leaves, tree = jax.tree.flatten(state)
    try:
        with path.open("rb") as raw, np.load(raw) as file:
            restored, step = [file[str(i)] for i in range(len(leaves))], int(file["step"])
    except (BadZipFile, EOFError, KeyError, OSError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged; without it this case is trained from its start: {error}"
        ) from error
    for was, is_ in zip(restored, leaves, strict=True):
        if (was.shape, was.dtype) != (is_.shape, is_.dtype):
            raise ValueError(f"{path} holds an array {was.shape}; wanted {is_.shape}")
    return jax.tree.unflatten(tree, [jnp.asarray(x) for x in restored]), step
