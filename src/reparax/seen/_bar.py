"""A bar of progress by rich. Only this file imports rich, and it is imported only where rich is installed."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(total: int) -> Generator[Progress, None, None]:
    """A bar for that many steps on the error stream, where somebody may see it: a terminal or a notebook."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not (console.is_terminal or console.is_jupyter)) as progress:
        progress.add_task("calibrate", total=total)
        yield progress
