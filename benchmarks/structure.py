"""How the code is built, in numbers, each beside its goal: ``PYTHONPATH=src python benchmarks/structure.py``.

Lines of code are those with code, without docstrings, comments and blanks. Names are those that the author of a stage
may write or read in a stage, beside the methods that users call; methods those that a class defines itself. A line of
classes goes from a stage to the last of its parents. A file is crossed where a call goes from one file to
another of the package. Times are of the CPU; compare them with those of another commit in the same hour.
"""

import ast
import inspect
import io
import sys
import time
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import reparax as rpx
from reparax.core.names import FAMILIES, family_of

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


def of_folders(*folders: str) -> int:
    """The lines of code of folders of the package."""
    return sum(lines(file) for folder in folders for file in (ROOT / folder).rglob("*.py"))


def depth(cls: type) -> int:
    """How many classes stand between a class and ``object``, itself included, on the longest way."""
    return 0 if cls is object else 1 + max(map(depth, cls.__bases__))


class Plain(rpx.Reparametrization):
    """A stage without arguments."""

    def apply_leaf(self, values: dict[str, jax.Array]) -> jax.Array:
        """The array."""
        return values["w"]


def definitions(file: Path) -> int:
    """The functions and classes of a file."""
    return sum(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.walk(ast.parse(file.read_text())))


def calls_of(call: Callable[[], object]) -> tuple[int, int, int, int]:
    """What a call runs of the package: files, functions, calls, and how often one goes from one file to another."""
    found = list[Any]()

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            found.append(frame.f_code)

    sys.setprofile(watch)
    call()
    sys.setprofile(None)
    files = [code.co_filename for code in found]
    crossings = sum(one != other for one, other in zip(["", *files], files, strict=False))
    return len(set(files)), len(set(found)), len(found), crossings


def seconds(call: Callable[[], object]) -> str:
    """The time of the CPU for a call."""
    began = time.process_time()
    call()
    return f"{time.process_time() - began:.2f} s"


def budgets() -> Iterable[tuple[str, Any, Any]]:
    """What has a goal: its title, the number and the goal."""
    modules = list(ROOT.rglob("*.py"))
    yield "lines of the package", sum(map(lines, modules)), 16000
    yield "files of the package", len(modules), 160
    yield "lines of core", of_folders("core"), 2400
    yield "lines of programs, transforms and axes", of_folders("programs", "transforms", "axes"), 4600
    yield "lines of io", of_folders("io"), 2600
    yield "entries of the package", sum(path.suffix == ".py" or any(path.glob("*.py")) for path in ROOT.iterdir()), 12
    yield "names at the top, families included", len(dir(rpx)), 48
    yield "names in the API index", 1 + sum(len(names) for _, names in FAMILIES.values()), 115
    yield "lines of tests", sum(map(lines, TESTS.rglob("*.py"))), 22000


def main() -> None:
    """Prints the tables."""
    public = {getattr(getattr(rpx, family), name) for name, family in family_of().items()}
    classes = [x for x in public if inspect.isclass(x) and issubclass(x, rpx.Parametrization)]
    methods = {c: sum(inspect.isfunction(x) or isinstance(x, property) for x in vars(c).values()) for c in classes}
    names = {name for name in dir(rpx.Reparametrization) if not name.startswith("_")}
    shown = {name for name in dir(Plain()) if not name.startswith("_")}
    key, chain, adapter = jax.random.key(0), rpx.WeightNorm() >> rpx.VarNoise(0.1), rpx.Freeze() >> rpx.LoRA(2)
    one = chain.init({"dense": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}})
    many = {f"layer{i}": {"kernel": jnp.ones((16, 16)), "bias": jnp.ones(16)} for i in range(250)}
    raw = chain.init(many)
    files, functions, calls, crossings = calls_of(lambda: jax.eval_shape(chain.apply, one, key))
    table = [
        *budgets(),
        ("first apply on two arrays: files", files, 12),
        ("first apply on two arrays: functions", functions, 60),
        ("first apply on two arrays: calls", calls, 400),
        ("first apply on two arrays: crossings", crossings, ""),
        ("the same again: crossings", calls_of(lambda: jax.eval_shape(chain.apply, one, key))[-1], ""),
        ("most definitions in a file of core", max(map(definitions, (ROOT / "core").rglob("*.py"))), ""),
        ("names on a stage, for users", len(names & shown), ""),
        ("names on a stage, for authors", len(names - shown | {"stochastic"}), ""),
        ("most methods of a class", max(methods.values()), ""),
        ("deepest line of classes", max(map(depth, classes)), ""),
        ("trace of apply, 500 arrays", seconds(lambda: jax.jit(chain.apply).trace(raw, key)), ""),
        (
            "the same, another function",
            seconds(lambda: jax.jit(lambda raw, key: chain.apply(raw, key)).trace(raw, key)),
            "",
        ),
        ("eager init of an adapter, 500 arrays", seconds(lambda: jax.block_until_ready(adapter.init(many, key))), ""),
        ("summary", seconds(lambda: rpx.summary(adapter, many)), ""),
        ("check", seconds(lambda: chain.check(raw, like=many)), ""),
    ]
    print(f"{'':40} {'now':>8} {'goal':>8}")
    for title, number, goal in table:
        print(f"{title:40} {number:>8} {goal:>8}")


if __name__ == "__main__":
    main()
