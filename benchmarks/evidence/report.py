"""What a page shows of the claims."""

import inspect
import io
from collections.abc import Mapping
from types import ModuleType

from IPython.display import Image, Markdown, display

from benchmarks.evidence.record import found

TRIED = "What was tried:"
EXPLORATORY = " **Exploratory**: settings or measures were changed after a first result, as the protocol says."


def verdicts(claims: Mapping[str, ModuleType]) -> Markdown:
    """A table of each claim and what was found here."""
    rows = [
        f"| {_said(claim).partition(chr(10))[0]} | {claim.verdict(found(name))} |" for name, claim in claims.items()
    ]
    return Markdown("\n".join(["| the claim | here |", "|---|---|", *rows]))


def report(claim: ModuleType) -> Image:
    """Shows a verdict in one line, the claim, the table, the sentence and the protocol; returns the picture."""
    numbers = found(claim.__name__.rpartition(".")[2])
    said, protocol = _said(claim).split("Protocol:\n")
    exploratory = EXPLORATORY * (TRIED in said)
    display(Markdown(f"**Here:** {claim.verdict(numbers)}{exploratory}\n\n*The claim:* {said}"))
    display(Markdown(claim.table(numbers)))
    display(Markdown(f"**In numbers.** {claim.sentence(numbers)}\n\n**Protocol.** {protocol}"))
    picture = io.BytesIO()
    claim.picture(numbers).savefig(picture, format="png", dpi=100)
    return Image(picture.getvalue())


def _said(claim: ModuleType) -> str:
    return inspect.cleandoc(claim.__doc__ or "")
