"""Tables of tests of which a few rows are quick: the others prove it again, so they belong to the thorough tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def thorough(*row: Any) -> Any:
    """A row with the mark."""
    return pytest.param(*row, marks=pytest.mark.thorough)


def mostly_thorough(rows: Iterable[Any], *quick: Any) -> list[Any]:
    """The rows, all but those named ``quick`` with the mark ``thorough``."""
    rows = list(rows)
    assert all(name in rows for name in quick), quick
    return [row if row in quick else thorough(row) for row in rows]
