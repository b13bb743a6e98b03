"""The state of a training run on disk, bit for bit."""

from pathlib import Path
from typing import TypeVar

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
    """The state of a checkpoint and its number of steps; `state` itself if there is none."""
    if not path.exists():
        return state, 0
    leaves, tree = jax.tree.flatten(state)
    with np.load(path) as file:
        restored = [jnp.asarray(file[str(i)]) for i in range(len(leaves))]
        return jax.tree.unflatten(tree, restored), int(file["step"])
