"""What a page shows of a claim."""

import inspect
import io
from types import ModuleType

from IPython.display import Image, Markdown, display

from benchmarks.evidence.record import found

TRIED = "What was tried:"
EXPLORATORY = "**Exploratory**: settings or measures were changed after a first result, as the protocol says.\n\n"


def report(claim: ModuleType) -> Image:
    """Shows the claim, a verdict in one line, the protocol, the table and the sentence; returns the picture."""
    numbers = found(claim.__name__.rpartition(".")[2])
    said, protocol = inspect.cleandoc(claim.__doc__ or "").split("Protocol:\n")
    verdict = f"**Here:** {claim.verdict(numbers)}\n\n{EXPLORATORY * (TRIED in said)}"
    display(Markdown(f"*The claim:* {said}\n{verdict}**Protocol.** {protocol}"), Markdown(claim.table(numbers)))
    display(Markdown(f"**In numbers.** {claim.sentence(numbers)}"))
    picture = io.BytesIO()
    claim.picture(numbers).savefig(picture, format="png", dpi=100)
    return Image(picture.getvalue())
