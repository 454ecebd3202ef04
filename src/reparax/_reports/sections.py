"""Reports as text: weights in sections, one line for those that are alike."""

from collections.abc import Sequence

from reparax._reports.folding import fold_lines

Row = tuple[str, tuple[str, str]]
"""A path, a type and a reason."""


def write_sections(head: str, titles: tuple[str, str], rows: Sequence[tuple[bool, Row]]) -> str:
    """A head, and below it a section of the rows whose flag is true, and one of the others; by their titles."""
    lines = [head]
    for title, wanted in zip(titles, (True, False), strict=True):
        alike = fold_lines(row for flag, row in rows if flag is wanted)
        lines += [f"  {title}:"] if alike else []
        width = max((len(row.path) for row in alike), default=0)
        lines += [f"    {row.path:<{width}}  {row.times}{row.value[0]}  {row.value[1]}".rstrip() for row in alike]
    return "\n".join(lines)
