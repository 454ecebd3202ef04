"""Transformations of gradients, as optax takes them."""

from collections.abc import Callable
from typing import NamedTuple

from reparax.core.tree.paths import PyTree


class Transformation(NamedTuple):
    """A transformation with optax's interface."""

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]
