"""Runs the Python of a page as a reader would, from top to bottom, and compares what it prints."""

import doctest
import re
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"# Needs (\w+)")
"""How a block begins that takes a library which the other pages do not."""
NOT_RUN = "# Not run here: "
"""How a block begins that nobody can run without more than a library."""
ROUNDED = re.compile(r"-?\d+(?:\.\d+(?:e-?\d+)?|(?= %))")
"""Numbers that another processor may round otherwise: those with a point, and whole percents."""


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return BLOCK.findall(page.read_text())


def can_run(block: str) -> bool:
    """Whether this environment has what a block says that it needs."""
    needed = NEEDS.match(block)
    return find_spec(needed[1]) is not None if needed else not block.startswith(NOT_RUN)


class Near(doctest.OutputChecker):
    """Takes rounded numbers that are near to those of the page."""

    def check_output(self, want, got, optionflags):
        if super().check_output(want, got, optionflags):
            return True
        texts = [ROUNDED.sub("", text).split() for text in (want, got)]
        numbers = [np.array(ROUNDED.findall(text), float) for text in (want, got)]
        return texts[0] == texts[1] and np.allclose(*numbers, rtol=0.1, atol=4 if "%" in want else 1e-6)


def run(page: Path) -> list[str]:
    """Runs the blocks of a page, and returns the examples that print something else than it says."""
    failed, names = list[str](), {"__name__": page.stem}
    runner = doctest.DocTestRunner(Near(), optionflags=doctest.ELLIPSIS)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for block in filter(can_run, blocks(page)):
            if ">>> " in block:
                examples = doctest.DocTestParser().get_doctest(block, names, page.name, None, None)
                examples.globs = names
                runner.run(examples, out=failed.append, clear_globs=False)
            else:
                exec(compile(block, page.name, "exec"), names)
    return failed
