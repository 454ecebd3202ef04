"""How far a reader goes from a verb to its answer, in numbers: ``PYTHONPATH=src python benchmarks/ways.py``.

These verbs all ask which stage makes an array, of which raw values. A way is one call after another, from the verb to
the class that holds the answer. Each step is written below, and checked against the sources: the function before names
it, or it overrides that function. So a way that the code no longer takes is an error here. What a step calls beside
the way, such as the check of its arguments, does not count, nor does the computation of numbers, which is that of
``init`` and ``apply``.

A room is a module on the way. A climb is a step from a module to one that imports it, directly or through others: the
reader cannot follow an import there, and has to know who overrides the method, or who passed the function.
"""

import ast
import functools
from itertools import pairwise
from pathlib import Path

import reparax as rpx

ROOT = Path(rpx.__file__).parent

ASKED = ("core/plan lineage_of", "core/plan decide", "core/plan Planner.plan")
PLAN = (*ASKED, "core/planners OnArrays.plan", "core/plan Planner.layer", "core/plan Layer")
TIED = (
    *ASKED,
    "stages/shared/_tie _Ties.plan",
    "stages/shared/_tie _Ties._sites",
    "stages/shared/_tie _Tied",
    "core/plan Site",
)
WAYS = {
    "transfer": ("training/_transfer transfer", "training/_transfer _carry_over", "training/_transfer _Old", *PLAN),
    "summary": ("training/_summary summary", "training/_summary _acting_stages", *PLAN),
    "owners": ("core/chain Parametrization.owners", *TIED),
    "to_peft": ("io/_peft_write to_peft", *PLAN),
    "to_torch": ("io/_torch to_torch", "io/_torch _make_plan", *PLAN),
}


@functools.cache
def parsed(module: str) -> ast.Module:
    """The syntax of a module, such as ``core/plan``."""
    return ast.parse((ROOT / f"{module}.py").read_text())


@functools.cache
def imported(module: str) -> frozenset[str]:
    """The modules of the package that a module imports, directly or through others."""
    direct: set[str] = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reparax."):
            direct.add(str(node.module).removeprefix("reparax.").replace(".", "/"))
    known = {each for each in direct if (ROOT / f"{each}.py").exists()}
    return frozenset(known.union(*map(imported, known)))


def words(step: str) -> set[str]:
    """The names in a function or class; an error if the module does not define it."""
    module, name = step.split()
    node: ast.AST = parsed(module)
    for part in name.split("."):
        inside = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part]
        if not inside:
            raise LookupError(f"{module}.py defines no {name}. Correct the way.")
        node = inside[0]
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def check(way: tuple[str, ...]) -> None:
    """Checks that the sources take each step of a way."""
    words(way[-1])
    for here, there in pairwise(way):
        name = there.split()[1].split(".")[-1]
        if name not in words(here) and not here.endswith(f".{name}"):
            raise LookupError(f"{here} does not name {there}. Correct the way.")


def main() -> None:
    """Prints the table."""
    print(f"{'verb':14}{'rooms':>6}{'climbs':>8}  way")
    for verb, way in WAYS.items():
        check(way)
        modules = [step.split()[0] for step in way]
        climbs = sum(here in imported(there) for here, there in pairwise(modules))
        print(f"{verb:14}{len(set(modules)):>6}{climbs:>8}  {', '.join(dict.fromkeys(modules))}")


if __name__ == "__main__":
    main()
