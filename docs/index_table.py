"""The index of the API: each public name with its signature and its first sentence."""

import importlib
import inspect
import re

from reparax.core.names import FAMILIES, TOP

PAGES = {"nnx": "models", "linen": "models", "equinox": "models", "haiku": "models"}
"""Where several families share a page."""
TITLES = {
    "stage": "Chains and stages",
    "norms": "Norms",
    "noise": "Noise",
    "numbers": "Numbers",
    "matrices": "Matrices",
    "sparse": "Sparse and frozen",
    "shared": "Shared and packed",
    "adapters": "Adapters",
    "quantized": "Quantization",
    "training": "Training",
    "transforms": "Transforms of a loss",
    "axes": "Axes",
    "io": "Files of torch and PEFT",
    "models": "Models that contain their chain",
    "testing": "Testing",
}
"""Of each page, in the order of the index."""
ARGUMENTS = {
    "Where": "The type of `where`, a regular expression, a predicate, or a selection.",
    "Axes": "The type of arguments for axes, a number, a name, or several.",
    "Number": "The type of arguments for numbers, one, a traced one, or one for each array.",
}
"""The types of arguments, which have no docstring of their own."""


def index() -> str:
    """A table for each page."""
    families = {page: [family for family in FAMILIES if PAGES.get(family, family) == page] for page in TITLES}
    return "\n\n".join(_section(page, families[page] or [page]) for page in TITLES)


def _section(page: str, families: list[str]) -> str:
    rows = []
    for family in families:
        module = importlib.import_module(f"reparax.{family}" if family == "testing" else FAMILIES[family].module)
        for name in FAMILIES[family].names if family in FAMILIES else ("check_laws", "check_step"):
            rows.append(_row(family, name, getattr(module, name)))
    return "\n".join([f"## [{TITLES[page]}]({page}.md)", "", "| | |", "|---|---|", *rows])


def _row(family: str, name: str, thing: object) -> str:
    root = "reparax" if family == "testing" else "rpx"
    called = f"rpx.{name}" if name in TOP and family != "linen" else f"{root}.{family}.{name}"
    text = ARGUMENTS.get(name) or inspect.getdoc(thing) or ""
    first = re.split(r"(?<=[.:])\s", " ".join(text.split()), maxsplit=1)[0].rstrip(":")
    first = re.sub(r":\w+:`~?\.?([^`]*)`", r"`\1`", first).replace("``", "`").replace("|", "\\|")
    return f"| `{called}` | {first.removesuffix('.')} |"
