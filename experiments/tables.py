"""Tables in the terminal, and numbers as people read them."""

from collections.abc import Iterable, Sequence
from textwrap import wrap

from rich.console import Console, Group
from rich.table import Table

__all__ = ["console", "human_bytes", "human_count", "human_seconds", "make_table"]

console = Console(highlight=False)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Group:
    """A table of text at the left and numbers to the right; no cell is broken over lines.

    One that is wider than the console becomes several, each with the first column.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [
        max([len(word) for word in name.split()] + [len(row[i]) for row in cells if i < len(row)])
        for i, name in enumerate(columns)
    ]
    parts: list[list[int]] = [[0]]
    for i in range(1, len(columns)):
        # A column takes a space and a border beside its text.
        if len(parts[-1]) > 1 and 1 + sum(widths[j] + 2 for j in (*parts[-1], i)) > console.width:
            parts.append([0])
        parts[-1].append(i)
    return Group(*(_one_table(title, columns, widths, cells, part) for part in parts))


def _one_table(
    title: str,
    columns: Sequence[str],
    widths: Sequence[int],
    cells: Sequence[Sequence[str]],
    part: Sequence[int],
) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", padding=(0, 0, 0, 1))
    for i in part:
        name = "\n".join(wrap(columns[i], widths[i], break_long_words=False))
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in cells:
        table.add_row(*(row[i] for i in part if i < len(row)))
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
    number = x / size
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}".rstrip()
