"""How the code is built, in numbers: ``PYTHONPATH=src python benchmarks/structure.py``.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import reparax as rpx
from reparax.core.names import family_of

ROOT = Path(rpx.__file__).parent
CORE = ("core",)
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


def line(cls: type) -> int:
    """How many classes stand between a class and ``object``, itself included, on the longest way."""
    return 0 if cls is object else 1 + max(map(line, cls.__bases__))


class Plain(rpx.Reparametrization):
    """A stage without arguments."""

    def apply_leaf(self, values: dict[str, jax.Array]) -> jax.Array:
        """The array."""
        return values["w"]


def definitions(file: Path) -> int:
    """The functions and classes of a file."""
    return sum(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.walk(ast.parse(file.read_text())))


def crossings(call: Callable[[], object]) -> int:
    """How often a call goes from one file of the package to another."""
    found, last = [0], [""]

    def watch(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(ROOT)):
            found[0] += file != last[0]
            last[0] = file

    sys.setprofile(watch)
    call()
    sys.setprofile(None)
    return found[0]


def seconds(call: Callable[[], object]) -> str:
    """The time of the CPU for a call."""
    began = time.process_time()
    call()
    return f"{time.process_time() - began:.2f} s"


def main() -> None:
    """Prints the table."""
    public = {getattr(getattr(rpx, family), name) for name, family in family_of().items()}
    classes = [x for x in public if inspect.isclass(x) and issubclass(x, rpx.Parametrization)]
    methods = {c: sum(inspect.isfunction(x) or isinstance(x, property) for x in vars(c).values()) for c in classes}
    files = [file for wing in CORE for file in (ROOT / wing).glob("*.py")]
    names = {name for name in dir(rpx.Reparametrization) if not name.startswith("_")}
    shown = {name for name in dir(Plain()) if not name.startswith("_")}
    key, chain, adapter = jax.random.key(0), rpx.WeightNorm() >> rpx.VarNoise(0.1), rpx.Freeze() >> rpx.LoRA(2)
    one = chain.init({"dense": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}})
    many = {f"layer{i}": {"kernel": jnp.ones((16, 16)), "bias": jnp.ones(16)} for i in range(250)}
    raw = chain.init(many)
    table = {
        "lines of _tree, _axes, _core, _stage": sum(map(lines, files)),
        "lines of the package": sum(map(lines, ROOT.rglob("*.py"))),
        "most definitions in a file of the core": max(map(definitions, files)),
        "names at the top, modules included": len(dir(rpx)),
        "names on a stage, for users": len(names & shown),
        "names on a stage, for authors": len(names - shown | {"stochastic"}),
        "most methods of a class": max(methods.values()),
        "deepest line of classes": max(map(line, classes)),
        "files crossed by apply on two arrays": crossings(lambda: jax.eval_shape(chain.apply, one, key)),
        "the same again": crossings(lambda: jax.eval_shape(chain.apply, one, key)),
        "trace of apply, 500 arrays": seconds(lambda: jax.jit(chain.apply).trace(raw, key)),
        "the same, another function": seconds(lambda: jax.jit(lambda raw, key: chain.apply(raw, key)).trace(raw, key)),
        "eager init of an adapter, 500 arrays": seconds(lambda: jax.block_until_ready(adapter.init(many, key))),
        "summary": seconds(lambda: rpx.summary(adapter, many)),
        "check": seconds(lambda: chain.check(raw, like=many)),
    }
    for title, number in table.items():
        print(f"{title:40} {number:>8}")


if __name__ == "__main__":
    main()
