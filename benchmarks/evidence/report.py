"""What a page shows of the claims."""

import importlib
import inspect
from types import ModuleType

from benchmarks.evidence import CLAIMS
from benchmarks.evidence.record import found

TRIED = "What was tried:"
EXPLORATORY = " **Exploratory**: settings or measures were changed after a first result, as the protocol says."


def verdicts() -> str:
    """A table of each claim and what was found here."""
    rows = [f"| {_said(claim).partition(chr(10))[0]} | {claim.verdict(found(name))} |" for name, claim in claims()]
    return "\n".join(["| the claim | here |", "|---|---|", *rows])


def reports() -> str:
    """A section for each claim: the verdict, the table and the protocol."""
    return "\n\n".join(_report(name, claim) for name, claim in claims())


def claims() -> list[tuple[str, ModuleType]]:
    """Each claim, by its name."""
    return [(name, importlib.import_module(f"benchmarks.evidence.{name}")) for name in CLAIMS]


def _report(name: str, claim: ModuleType) -> str:
    numbers = found(name)
    said, protocol = _said(claim).split("Protocol:\n")
    title, source = said.strip().split("\n", 1)
    exploratory = EXPLORATORY * (TRIED in said)
    parts = [f"### {title.removesuffix('.')}", source.strip(), f"**Here:** {claim.verdict(numbers)}{exploratory}"]
    return "\n\n".join([*parts, claim.table(numbers), f"**Protocol.** {protocol.strip()}"])


def _said(claim: ModuleType) -> str:
    return inspect.cleandoc(claim.__doc__ or "")
