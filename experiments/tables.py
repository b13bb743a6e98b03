"""Tables in the terminal, and numbers as people read them."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["console", "human_bytes", "human_count", "human_seconds", "make_table"]

console = Console(highlight=False)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A rich table: the first column is text, numbers are to the right."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    return table


def human_bytes(size: float | None) -> str:
    """Bytes with a decimal unit."""
    return _human(size, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def human_seconds(time: float | None) -> str:
    """Seconds with a unit."""
    return _human(time, ((1, "s"), (1e-3, "ms"), (1e-6, "µs")))


def human_count(count: float | None) -> str:
    """A count of operations with a unit."""
    return _human(count, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")))


def _human(x: float | None, units: Sequence[tuple[float, str]]) -> str:
    if x is None:
        return "-"
    if x == 0:
        return "0"
    size, unit = next((u for u in units if x >= u[0]), units[-1])
    return f"{x / size:.3g} {unit}".rstrip()
