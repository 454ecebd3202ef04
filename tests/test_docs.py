"""Every Python block of the README and every cell of a notebook runs, in order; networks and optax promote."""

import doctest
import re
from pathlib import Path

import jax
import matplotlib
import pytest

matplotlib.use("agg")

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.md"))


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    cells = re.findall(r"```{code-cell}\n(.*?)```", path.read_text(), flags=re.DOTALL)
    assert 0 < len(cells) <= 12
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        globs: dict[str, object] = {}
        for number, cell in enumerate(cells):
            exec(compile(cell, f"{path.name}, cell {number}", "exec"), globs)


def test_readme_runs(blocks):
    globs: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for number, block in enumerate(blocks):
        name = f"README block {number}"
        examples = doctest.DocTestParser().get_doctest(block, globs, name, str(README), 0)
        code = "" if examples.examples else block
        examples.globs = globs
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            exec(compile(code, name, "exec"), globs)
            runner.run(examples, clear_globs=False)
        globs |= examples.globs
    assert runner.summarize(verbose=False).failed == 0
    assert len(blocks) >= 6
