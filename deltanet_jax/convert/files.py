"""Checkpoint directories, config.json and safetensors: read lazily, written whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# Without safetensors the command line still answers `--help`.
try:
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file
except ModuleNotFoundError:
    MISSING = "converting checkpoints needs safetensors: pip install 'deltanet_jax[convert]'"
else:
    MISSING = ""

__all__ = [
    "LazyArray",
    "Tensor",
    "compare",
    "new_directory",
    "promoted_dtype",
    "read_config",
    "read_tensors",
    "refuse",
    "without",
    "write_checkpoint",
]

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Tensor(NamedTuple):
    """A tensor in a file, not read yet."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # in the words of safetensors
    rows: slice = slice(None)

    def read(self) -> np.ndarray:
        with safe_open(self.file, "np") as f:
            array: np.ndarray = f.get_slice(self.name)[self.rows]
        return array

    def part(self, rows: slice) -> "Tensor":
        """The tensor of these rows alone."""
        length = len(range(*rows.indices(self.shape[0])))
        return self._replace(shape=(length, *self.shape[1:]), rows=rows)


class LazyArray(NamedTuple):
    """An array to be written, made only when its file is."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def refuse(what: object, problems: list[str]) -> None:
    """Raise one error that lists all problems, if there are any."""
    if problems:
        raise ValueError(f"{what} cannot be converted:\n" + "\n".join(f"  - {p}" for p in problems))


def without(names: Mapping[str, Any], ignore: tuple[str, ...]) -> dict[str, Any]:
    """The entries whose names match none of these shell patterns."""
    return {n: x for n, x in names.items() if not any(fnmatchcase(n, p) for p in ignore)}


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json as a dictionary."""
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{directory} does not hold {CONFIG}")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold an object; got {type(data).__name__}")
    return data


def read_tensors(directory: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Every tensor of a checkpoint in one file or in shards, and what is wrong with the files."""
    _check_safetensors()
    if not (directory / INDEX).is_file():
        if not (directory / SINGLE).is_file():
            raise FileNotFoundError(f"{directory} holds neither {SINGLE} nor {INDEX}")
        return _tensors_of(directory / SINGLE)
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    places = _read_object(directory / INDEX).get("weight_map")
    if not isinstance(places, dict):
        return {}, [f"{INDEX} has no `weight_map`"]
    strange = [n for n in places.values() if not isinstance(n, str) or Path(n).name != n]
    if strange:
        return {}, [f"{INDEX} must name files of this directory; got {strange[0]!r}"]
    for name in sorted(set(places.values())):
        if not (directory / name).is_file():
            problems.append(f"the file {name} of the index is missing")
            continue
        tensors, wrong = _tensors_of(directory / name)
        problems += wrong
        problems += [f"{n} is in {name} but not in the index" for n in tensors if n not in places]
        found |= {n: t for n, t in tensors.items() if places.get(n) == name}
    return found, problems


def _check_safetensors() -> None:
    if MISSING:
        raise ImportError(MISSING)


def _tensors_of(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    tensors = {}
    try:
        with safe_open(path, "np") as f:
            for name in f.keys():  # noqa: SIM118 (not a mapping)
                part = f.get_slice(name)
                tensors[name] = Tensor(path, name, tuple(part.get_shape()), part.get_dtype())
    except SafetensorError as error:
        return {}, [f"{path.name} cannot be read: {error}"]
    wrong = [f"{t.name} has dtype {t.dtype}" for t in tensors.values() if t.dtype not in DTYPES]
    return tensors, wrong


def promoted_dtype(tensors: Mapping[str, Tensor]) -> jnp.dtype:
    """The narrowest dtype that holds all of these exactly."""
    found = [jnp.dtype(DTYPES[t.dtype]) for t in tensors.values() if t.dtype in DTYPES]
    dtype = found[0] if found else jnp.dtype(jnp.float32)
    for other in found[1:]:
        dtype = jnp.promote_types(dtype, other)
    return dtype


def compare(wanted: Mapping[str, LazyArray], found: Mapping[str, Tensor]) -> list[str]:
    """List tensors that are missing, unknown or of another shape."""
    return [
        *(f"{name} is missing, shape {x.shape}" for name, x in wanted.items() if name not in found),
        *(f"{name} is unknown, shape {t.shape}" for name, t in found.items() if name not in wanted),
        *(
            f"{name} has shape {found[name].shape}, wanted {x.shape}"
            for name, x in wanted.items()
            if name in found and found[name].shape != x.shape
        ),
    ]


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory that gets its name only when the block has ended without an error.

    Raises:
        FileExistsError: If there is something of that name.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; nothing was written")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.mkdir()
    try:
        yield unfinished
        for file in unfinished.rglob("*"):
            _sync(file)
        unfinished.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    """Flush to the disk, so that after a power cut no name exists without its bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checkpoint(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, LazyArray],
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """A new directory with config.json and the tensors, in shards if they need several."""
    _check_safetensors()
    if max_shard_bytes <= 0:
        raise ValueError(f"`max_shard_bytes` must be positive; got {max_shard_bytes}")
    shards = _shards(tensors, max_shard_bytes)
    with new_directory(path) as directory:
        places: dict[str, str] = {}
        for i, names in enumerate(shards, start=1):
            name = f"model-{i:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
            # Only contiguous arrays are written as they are.
            arrays = {n: np.ascontiguousarray(tensors[n].make()) for n in names}
            save_file(arrays, directory / name, metadata={"format": "pt"})
            places |= dict.fromkeys(names, name)
        if len(shards) > 1:
            total = sum(t.nbytes for t in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (directory / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")


def _shards(tensors: Mapping[str, LazyArray], limit: int) -> list[list[str]]:
    """Names in order, in groups of at most `limit` bytes; a larger tensor is alone."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards
