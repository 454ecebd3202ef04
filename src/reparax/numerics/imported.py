"""Libraries that the package imports when one of its modules is named."""

import importlib
from typing import Any


def import_library(module: str, needs: str, install: str) -> Any:
    """The module of a library.

    Raises:
      ModuleNotFoundError: If the library is not installed; the text says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"{needs} needs {library}, which is not installed. Write `pip install {install}`.", name=library
        ) from None
