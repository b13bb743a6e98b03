"""The record of a run: a directory that is readable at any moment, and can be continued.

::

    results/<experiment>/<run>/
        config.json      options, versions, device, git hash
        metrics.jsonl    one row a line, on disk as soon as it is measured
        table.csv        the rows of the main table
        *.png, *.pdf     figures
"""

import csv
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import jax

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["RecordError", "Run", "environment", "read_rows"]

Row = dict[str, Any]

PACKAGES = ("deltanet_jax", "jax", "jaxlib", "flax", "optax", "numpy", "matplotlib")


class RecordError(Exception):
    """A run directory that cannot be used; the message says why."""


def environment() -> Row:
    """Return what a figure depends on besides its options."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": device.platform,
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "device_count": jax.device_count(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "xla_flags": os.environ.get("XLA_FLAGS"),
        **_git(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git() -> Row:
    """The commit of this checkout, and whether tracked files differ from it."""
    here = Path(__file__).parent

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit, changes = ask("rev-parse", "HEAD"), ask("status", "--porcelain", "-uno")
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}


def _plain(x: object) -> Any:
    """`x` in the types of strict JSON; a number that is not finite becomes its name."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return _plain(dataclasses.asdict(x))
    if isinstance(x, Mapping):
        return {str(name): _plain(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    if x is None or isinstance(x, bool | int | str):
        return x
    if isinstance(x, Path):
        return str(x)
    number = float(x)  # type: ignore[arg-type]
    return number if math.isfinite(number) else str(number)


def read_rows(path: Path) -> list[Row]:
    """The whole rows of a `metrics.jsonl`; a line torn by a kill is left out."""
    return [json.loads(line) for line in _whole_lines(path)]


def _whole_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn
    return [line for line in lines if line.strip()]


def _read_object(path: Path, text: str | bytes) -> Row:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise RecordError(f"{path} must hold objects; got {type(data).__name__}")
    return data


def _lock(directory: Path) -> IO[str]:
    """Hold a directory until the file is closed, or this process ends."""
    file = (directory / ".lock").open("a+", encoding="utf-8")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RecordError(f"{directory} is in use by {holder}") from None
    except OSError:  # a file system without locks
        pass
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return file


class Run:
    """One run directory, open for appending; a context manager."""

    def __init__(self, directory: Path, config: Row) -> None:
        """Open a directory that `start` or `resume` has checked."""
        self.directory = directory
        self.config = config
        self._opened = time.monotonic()
        metrics = directory / "metrics.jsonl"
        self._lock = _lock(directory)
        kept = _whole_lines(metrics)
        try:
            self.rows: list[Row] = [_read_object(metrics, line) for line in kept]
        except RecordError:
            self._lock.close()
            raise
        whole = b"".join(line + b"\n" for line in kept)
        if metrics.exists() and metrics.read_bytes() != whole:
            _replace(metrics, whole)
        self._file = metrics.open("a", encoding="utf-8")

    @classmethod
    def start(cls, experiment: str, options: object, root: Path, name: str | None = None) -> Self:
        """A new directory under `root/<experiment>`, named by the time unless `name` is given."""
        parent = root / experiment
        parent.mkdir(parents=True, exist_ok=True)
        directory = _new_directory(parent, name)
        config = {
            "experiment": experiment,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "options": _plain(options),
            "environment": environment(),
        }
        _replace(directory / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        return cls(directory, config)

    @classmethod
    def resume(cls, experiment: str, directory: Path) -> Self:
        """Continue a directory; raise `RecordError` if it is not one of this experiment."""
        path = directory / "config.json"
        try:
            config = _read_object(path, path.read_bytes())
        except FileNotFoundError:
            raise RecordError(
                f"{directory} is not a run directory: it has no config.json"
            ) from None
        if config.get("experiment") != experiment:
            raise RecordError(
                f"{directory} is a run of {config.get('experiment')!r}, not of {experiment!r}"
            )
        for part in ("options", "environment"):
            if not isinstance(config.get(part), dict):
                raise RecordError(f"{path} must hold an object `{part}`")
        run = cls(directory, config)
        now = environment()
        changed = {key: now[key] for key in now if now[key] != config["environment"].get(key)}
        run.write({"kind": "resumed", "changed_environment": changed})
        return run

    @property
    def seconds(self) -> float:
        """Time since the directory was opened."""
        return time.monotonic() - self._opened

    def write(self, row: Mapping[str, object]) -> Row:
        """Append a row and put it on disk."""
        plain = _plain(row)
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows.append(plain)
        return plain

    def find(self, **key: object) -> Row | None:
        """The newest row with these values."""
        found = self.select(**key)
        return found[-1] if found else None

    def select(self, **key: object) -> list[Row]:
        """All rows with these values, oldest first."""
        wanted = _plain(key)
        return [row for row in self.rows if all(row.get(n) == x for n, x in wanted.items())]

    def write_table(self, rows: Iterable[Row], name: str = "table.csv") -> Path:
        """Write rows as CSV; the columns are those of all rows, in order of appearance."""
        rows = list(rows)
        columns = list(dict.fromkeys(column for row in rows for column in row))
        path = self.directory / name
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(_plain(row) for row in rows)
        return path

    def __enter__(self) -> Self:
        """The run itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the metrics, and let other processes continue the run."""
        self._file.close()
        self._lock.close()


def _new_directory(parent: Path, name: str | None) -> Path:
    if name is not None:
        if Path(name).name != name:
            raise RecordError(f"a run's name must be one path component; got {name!r}")
        directory = parent / name
        if directory.exists():
            raise RecordError(f"{directory} exists already; continue it with --resume {directory}")
        directory.mkdir()
        return directory
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        try:
            (parent / f"{stamp}{suffix}").mkdir()
        except FileExistsError:
            continue
        return parent / f"{stamp}{suffix}"
    raise RecordError(f"no free run directory under {parent}")


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that it is either the old or the new one, whole."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_bytes(content)
    part.replace(path)
