"""A page that cannot be run fails the build, in one sentence that names it; the other pages are written."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n# A page\n\n```{code-cell}\n%s\n```\n"
CELLS = {"wrong": "{}['kernel']", "slow": "import time\ntime.sleep(60)", "good": "print(1)"}


def test_pages_that_fail_are_named(tmp_path):
    (tmp_path / "pages.md").write_text("# Pages\n\n```{toctree}\nwrong\nslow\ngood\n```\n")
    for name, cell in CELLS.items():
        (tmp_path / f"{name}.md").write_text(PAGE % cell)
    settings = ["-D", "nb_execution_timeout=3", "-D", "root_doc=pages", "-c", str(DOCS)]
    options = ["-E", "-W", "--keep-going", "-q", "--no-color", *settings]
    sphinx = [sys.executable, "-m", "sphinx", *options, ".", "built"]
    ran = subprocess.run(sphinx, cwd=tmp_path, capture_output=True, text=True, check=False)
    warnings = [line for line in ran.stderr.splitlines() if "WARNING: " in line]
    assert ran.returncode == 1
    assert warnings == [
        f"{tmp_path}/slow.md: WARNING: this page could not be run: one of its cells took longer than 3 seconds, "
        "which is nb_execution_timeout. The traceback is in built/reports/slow.err.log.",
        f"{tmp_path}/wrong.md: WARNING: this page could not be run: KeyError: 'kernel'. "
        "The traceback is in built/reports/wrong.err.log.",
    ]
    assert "KeyError" in (tmp_path / "built" / "reports" / "wrong.err.log").read_text()
    assert (tmp_path / "built" / "good.html").exists()
