"""Checkpoint directories, config.json and safetensors: read lazily, written whole or not at all."""

import json
import os
import reprlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from deltanet_jax.core import checks

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
    "enough_tensors",
    "matches",
    "new_directory",
    "promoted_dtype",
    "read_config",
    "read_tensors",
    "refuse",
    "shown",
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


def shown(x: object) -> str:
    """Return a value of a file for a message, cut where it is long or deep."""
    cut = reprlib.Repr()
    cut.maxstring = cut.maxother = 80
    return cut.repr(x)


def refuse(what: object, problems: list[str]) -> None:
    """Raise one error that lists all problems, if there are any."""
    if problems:
        raise ValueError(f"{what} cannot be converted:\n" + "\n".join(f"  - {p}" for p in problems))


def enough_tensors(layers: int, found: Mapping[str, Tensor]) -> list[str]:
    """Return what is wrong if there are more layers than tensors; making them all takes long."""
    wrong = f"config.json has {layers} layers of this kind; the files hold {len(found)} tensors"
    return [wrong] if layers > len(found) else []


def without(names: Mapping[str, Any], ignore: tuple[str, ...]) -> dict[str, Any]:
    """The entries whose names match none of these shell patterns."""
    return {n: x for n, x in names.items() if not matches(n, ignore)}


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name matches one of these shell patterns."""
    return any(fnmatchcase(name, p) for p in patterns)


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json as a dictionary."""
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{directory} does not hold {CONFIG}")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold an object; got {type(data).__name__}")
    return data


def read_tensors(
    directory: Path, wanted: Callable[[str], bool]
) -> tuple[dict[str, Tensor], list[str]]:
    """Find the tensors with wanted names, in one file or in shards, and what is wrong with them.

    Shards that hold none of them need not be there.
    """
    _check_safetensors()
    if not (directory / INDEX).is_file():
        if not (directory / SINGLE).is_file():
            raise FileNotFoundError(f"{directory} holds neither {SINGLE} nor {INDEX}")
        return _tensors_of(directory / SINGLE, wanted)
    places = _read_object(directory / INDEX).get("weight_map")
    if not isinstance(places, dict):
        return {}, [f"{INDEX} has no `weight_map`"]
    strange = [n for n in places.values() if not isinstance(n, str) or Path(n).name != n]
    if strange:
        return {}, [f"{INDEX} must name files of this directory; got {shown(strange[0])}"]
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for name in sorted({file for tensor, file in places.items() if wanted(tensor)}):
        if not (directory / name).is_file():
            problems.append(f"the file {name} of the index is missing")
            continue
        tensors, wrong = _tensors_of(directory / name, wanted)
        problems += wrong
        problems += [f"{n} is in {name} but not in the index" for n in tensors if n not in places]
        found |= {n: t for n, t in tensors.items() if places.get(n) == name}
    return found, problems


def _check_safetensors() -> None:
    if MISSING:
        raise ImportError(MISSING)


def _tensors_of(path: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], list[str]]:
    tensors = {}
    try:
        with safe_open(path, "np") as f:
            for name in filter(wanted, f.keys()):
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
def new_directory(path: Path, size: int) -> Iterator[Path]:
    """A directory that gets its name only when the block has ended without an error.

    Args:
        path: Path of the new directory.
        size: Bytes that it will hold, at least.

    Raises:
        FileExistsError: If there is something of that name.
        OSError: If the disk has less space than that.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; nothing was written")
    path.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(path.parent).free) < size:
        raise OSError(f"{path} needs {size:,} bytes and the disk has {free:,}; nothing was written")
    # A killed process may have left a directory under the number that this one has now.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.unfinished")
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
    limit = checks.whole("max_shard_bytes", max_shard_bytes, least=1)
    shards = _shards(tensors, limit)
    total = sum(t.nbytes for t in tensors.values())
    with new_directory(path, total) as directory:
        places: dict[str, str] = {}
        for i, names in enumerate(shards, start=1):
            name = f"model-{i:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
            # Only contiguous arrays are written as they are.
            arrays = {n: np.ascontiguousarray(tensors[n].make()) for n in names}
            _save(arrays, directory / name)
            places |= dict.fromkeys(names, name)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (directory / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")


def _save(arrays: dict[str, np.ndarray], path: Path) -> None:
    try:
        save_file(arrays, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for example
        raise OSError(f"{path} cannot be written: {error}") from error


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
