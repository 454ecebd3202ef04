"""What a page shows of a claim."""

import inspect
import io
from types import ModuleType

from IPython.display import Image, Markdown, display

from benchmarks.evidence.record import found


def report(claim: ModuleType) -> Image:
    """Shows the claim with its protocol and the table, prints the sentence, and returns the picture."""
    numbers = found(claim.__name__.rpartition(".")[2])
    said, protocol = inspect.cleandoc(claim.__doc__ or "").split("Protocol:\n")
    display(Markdown(f"{said}\n**Protocol.** {protocol}"), Markdown(claim.table(numbers)))
    print(claim.sentence(numbers))
    picture = io.BytesIO()
    claim.picture(numbers).savefig(picture, format="png", dpi=100)
    return Image(picture.getvalue())
