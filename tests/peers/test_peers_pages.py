"""The page for users of other libraries, with their programs beside ours."""

import pytest
from pages import NEEDS, ROOT, blocks, can_run, run

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_programs_of_other_libraries_run(tmp_path, monkeypatch):
    page = ROOT / "docs" / "coming_from.md"
    assert [block for block in blocks(page) if NEEDS.match(block) and not can_run(block)] == []
    monkeypatch.chdir(tmp_path)
    assert run(page) == []
