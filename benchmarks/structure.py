"""How large the code is, each number beside its goal: ``PYTHONPATH=src python benchmarks/structure.py``.

Lines of code are those with code, without docstrings, comments and blanks.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp

import reparax as rpx
from reparax.core.names import FAMILIES

ROOT = Path(rpx.__file__).parent
TESTS = ROOT.parents[1] / "tests"
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines(file: Path) -> int:
    """The lines of code of a file."""
    text, documented, found = file.read_text(), set[int](), set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        found.update(() if token.type in LAYOUT else range(token.start[0], token.end[0] + 1))
    return len(found - documented)


def lines_of_folders(*folders: Path) -> int:
    """The lines of code of all files in folders."""
    return sum(lines(file) for folder in folders for file in folder.rglob("*.py"))


def classes(file: Path) -> int:
    """How many classes a file defines."""
    return sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(file.read_text())))


def calls_of(call: Callable[[], object]) -> list[CodeType]:
    """The functions of the package that a call runs, each as often as it does."""
    found = list[CodeType]()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            found.append(frame.f_code)

    sys.setprofile(watch)
    call()
    sys.setprofile(None)
    return found


def first_apply() -> list[CodeType]:
    """What the first ``apply`` of two stages on two arrays runs."""
    chain = rpx.WeightNorm() >> rpx.VarNoise(0.1)
    raw = chain.init({"dense": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}})
    return calls_of(lambda: jax.eval_shape(chain.apply, raw, jax.random.key(0)))


def table() -> Iterable[tuple[str, int, int | str]]:
    """What is counted: its title, the number and the goal, if it has one."""
    core = list((ROOT / "core").rglob("*.py"))
    apply = first_apply()
    yield "package: lines", lines_of_folders(ROOT), 16500
    yield "package: files", len(list(ROOT.rglob("*.py"))), 115
    yield "core: lines", lines_of_folders(ROOT / "core"), 4000
    yield "core: files", len(core), 24
    yield "core: classes", sum(map(classes, core)), 26
    readers = [ROOT / folder for folder in ("programs", "transforms", "axes")]
    yield "programs, transforms and axes: lines", lines_of_folders(*readers), 4400
    for folder in (*readers, ROOT / "stages"):
        yield f"{folder.name}: lines", lines_of_folders(folder), ""
    yield "io: lines", lines_of_folders(ROOT / "io"), 1800
    yield "tests: lines", lines_of_folders(TESTS), 22500
    yield "names at the top, families included", len(dir(rpx)), 48
    yield "names in the API index", 1 + sum(len(names) for _, names in FAMILIES.values()), 110
    yield "first apply: functions", len(set(apply)), 180
    yield "first apply: calls", len(apply), 640


def main() -> None:
    """Prints the table."""
    print(f"{'':40} {'now':>8} {'goal':>8}")
    for title, number, goal in table():
        print(f"{title:40} {number:>8} {goal:>8}")


if __name__ == "__main__":
    main()
