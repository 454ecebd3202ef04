"""Reports as text: weights in sections, one line for those that are alike."""

from collections.abc import Iterable, Mapping

from reparax._tree.folding import folded

Row = tuple[str, tuple[str, str]]
"""A path, a type and a reason."""


def sections(head: str, rows: Mapping[str, Iterable[Row]]) -> str:
    """A head, and below it each section that has rows, by its title."""
    lines = [head]
    for title, found in rows.items():
        alike = folded(found)
        lines += [f"  {title}:"] if alike else []
        width = max((len(row.path) for row in alike), default=0)
        lines += [f"    {row.path:<{width}}  {row.times}{row.value[0]}  {row.value[1]}".rstrip() for row in alike]
    return "\n".join(lines)
