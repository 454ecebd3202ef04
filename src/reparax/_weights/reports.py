"""Functions that can tell what they do to weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


class Reports(ABC):
    """A function of which ``explain`` gives a report."""

    @abstractmethod
    def explained(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the function does with these arguments, or with their types; its repr is a table."""
