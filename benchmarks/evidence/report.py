"""What a page shows of a claim."""

import inspect
from types import ModuleType
from typing import Any

from IPython.display import Markdown, display

from benchmarks.evidence.record import found


def report(claim: ModuleType) -> Any:
    """Shows the claim with its protocol and the table, prints the sentence, and returns the picture."""
    numbers = found(claim.__name__.rpartition(".")[2])
    said, protocol = inspect.cleandoc(claim.__doc__ or "").split("Protocol:\n")
    display(Markdown(f"{said}\n**Protocol.** {protocol}"), Markdown(claim.table(numbers)))
    print(claim.sentence(numbers))
    return claim.picture(numbers)
