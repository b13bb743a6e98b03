"""Progress bars."""

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.tables import console

__all__ = ["progress_bar"]


SECONDS = 30.0  # between two lines of a log


class _Progress(Progress):
    """Bars in a terminal; elsewhere a line now and then, since bars appear there at the end."""

    def __init__(self, *columns: ProgressColumn, console: Console) -> None:
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._last = -SECONDS

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, as `rich` does."""
        super().update(task_id, **changes)
        if self.console.is_terminal or time.monotonic() < self._last + SECONDS:
            return
        self._last = time.monotonic()
        task = self.tasks[task_id]
        done = f"{task.description}: {task.completed:.0f} of {task.total:.0f}"
        self.console.print(f"{done}  {task.fields['note']}".rstrip(), soft_wrap=True)


def progress_bar() -> Progress:
    """Bars that show what is done, what is left and what is being done; a context manager."""
    return _Progress(
        TextColumn("{task.description}", style="bold"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )
