"""Reports as text: weights in sections, one line for those that are alike."""

from collections.abc import Sequence

from reparax.core.reports.folding import fold_lines

Row = tuple[str, tuple[str, str]]
"""A path, a type and a reason."""


def write_sections(head: str, titles: tuple[str, str], rows: Sequence[tuple[bool, Row]]) -> str:
    """A head, and below it a section of the rows whose flag is true, and one of the others; by their titles."""
    lines = [head]
    for title, title_flag in zip(titles, (True, False), strict=True):
        rows_of_section = fold_lines(row for flag, row in rows if flag is title_flag)
        lines += [f"  {title}:"] if rows_of_section else []
        width = max((len(row.path) for row in rows_of_section), default=0)
        lines += [
            f"    {row.path:<{width}}  {row.times}{row.value[0]}  {row.value[1]}".rstrip() for row in rows_of_section
        ]
    return "\n".join(lines)
