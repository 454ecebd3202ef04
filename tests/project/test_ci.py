"""`.ci/run`: all parts in their order, and a table at the end that names those that failed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = r"""
lint:
	@echo "0 errors, 0 warnings, 0 informations"
test:
	@echo "4362 passed, 3 skipped in 293.10s (0:04:53)"
docs:
	@echo pages
bad:
	@printf '\033[31m=== 1 failed, \033[32m4 passed in 2.1s ===\033[0m\n'; exit 3
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / ".ci").mkdir()
    (tmp_path / "Makefile").write_text(MAKEFILE)
    shutil.copy(ROOT / ".ci" / "parts.py", tmp_path / ".ci")
    script = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")

    def run(*parts):
        ran = subprocess.run(["bash", script, *parts], capture_output=True, text=True, check=False)
        table = ran.stdout[ran.stdout.rindex("part  ") :].splitlines()[1:]
        assert all(re.fullmatch(r" +\d+:\d\d +\d+:\d\d +\d+", line[14:39]) for line in table[:-1])
        assert re.fullmatch(r" +\d+:\d\d", table[-1][14:23])
        return ran.returncode, [(line[:14].strip(), line[41 if line in table[:-1] else 25 :]) for line in table]

    return run


def test_parts_that_fail_are_named_and_those_after_them_are_run(run):
    assert run("bad", "docs", "bad") == (
        1,
        [
            ("bad", "1 failed, 4 passed in 2.1s"),
            ("docs", "done"),
            ("bad", "1 failed, 4 passed in 2.1s"),
            ("in all", "make bad, make bad failed."),
        ],
    )


def test_its_parts_are_targets_of_make_and_lint_and_test_come_first():
    parts = re.search(r"^PARTS = \((.*)\)$", (ROOT / ".ci" / "parts.py").read_text(), flags=re.MULTILINE)[1]
    names = re.findall(r'"([\w-]+)"', parts)
    assert names[:2] == ["lint", "test"]
    assert set(names) == {"lint", "test", "docs", "test-thorough", "test-avx2", "test-peers", "test-versions", "dist"}
    makefile = (ROOT / "Makefile").read_text()
    for name in names:
        assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE)
    made = subprocess.run(["make", "-n", "test-avx2"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    numeric = re.findall(r" (tests/\S+)", made)
    assert len(numeric) > 9
    assert [name for name in numeric if not (ROOT / name).exists()] == []
