"""How much memory this machine has left."""

import os
from pathlib import Path

__all__ = ["available_memory"]

CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that a process here can still take: of the machine, and of its container."""
    free = [_machine()]
    limit, used = (_number(CGROUP / f"memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        free.append(max(limit - used, 0))
    return min(free)


def _machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        # No count of what caches would give back here: half of all memory is a fair guess.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def _number(path: Path) -> int | None:
    """The integer in a file; `None` if there is no file or it says that there is no limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
