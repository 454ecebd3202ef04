"""Tables for rich. Only this file imports rich, and only rich's own calls import this file."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text


def titled_table(title: str, lines: Sequence[Sequence[str]], left: Sequence[str]) -> Group:
    """A title and a table of ``lines``: the first line names the columns, the last one holds their sums.

    Columns that ``left`` does not name are aligned to the right.
    """
    table = Table(box=SIMPLE_HEAD)
    names, *body, total = lines
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for cells in body:
        table.add_row(*map(Text, cells))
    table.add_section()
    table.add_row(*map(Text, total))
    return Group(Text(title), table)
