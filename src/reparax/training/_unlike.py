"""Trees that should be alike: the first place at which one differs from the other, for errors."""

from dataclasses import dataclass, replace
from enum import StrEnum

from reparax._tree.differences import by_parameter
from reparax._tree.paths import PyTree

Shapes = dict[str, tuple[int, ...]]


class TreeOf(StrEnum):
    """What a tree belongs to that is not the wanted one, in the words of errors."""

    THE_MODEL = "the model"
    """It has arrays where a raw tree has markers."""
    A_RAW_TREE = "a raw tree"
    """It has markers where the model has arrays."""
    ANOTHER_CHAIN = "another chain"
    ANOTHER_MODEL = "another model"
    OTHER_SHAPES = "other shapes"


@dataclass(frozen=True)
class Difference:
    """Where a tree differs from the one that is wanted.

    Attributes:
      path: The path.
      wanted: What should be there, in words.
      got: What is there, in words.
      of: What the tree belongs to instead.
    """

    path: str
    wanted: str
    got: str
    of: TreeOf

    @property
    def swapped(self) -> "Difference":
        """The same, if it is the other tree that is wrong."""
        return replace(self, wanted=self.got, got=self.wanted)

    def __str__(self) -> str:
        return f"expected {self.wanted} at {self.path!r}, got {self.got}"


def first_difference(actual: PyTree, like: PyTree) -> Difference | None:
    """The first difference between the arrays of two trees; another stage comes before all others."""
    shapes, expected_shapes = (by_parameter(tree, lambda x: tuple(x.shape), empty=False) for tree in (actual, like))
    for path in expected_shapes:
        if path in shapes and (difference := _stage_difference(path, shapes[path], expected_shapes[path])) is not None:
            return difference
    pairs = [
        (path, shapes.get(path, {}), expected_shapes.get(path, {}))
        for path in dict.fromkeys([*expected_shapes, *shapes])
    ]
    return next((difference for pair in pairs if (difference := _value_difference(*pair)) is not None), None)


def _stage_difference(path: str, shapes: Shapes, expected_shapes: Shapes) -> Difference | None:
    """The difference between the outermost markers of a parameter, or None."""
    mark, wanted_mark = (next(iter(values)).split("/")[0] for values in (shapes, expected_shapes))
    if mark == wanted_mark:
        return None
    of = TreeOf.ANOTHER_CHAIN if mark and wanted_mark else TreeOf.THE_MODEL if wanted_mark else TreeOf.A_RAW_TREE
    return Difference(path, repr(wanted_mark) if wanted_mark else "an array", repr(mark) if mark else "an array", of)


def _value_difference(path: str, shapes: Shapes, expected_shapes: Shapes) -> Difference | None:
    """The first difference between the shapes of a parameter's values, or None."""
    for path_below in dict.fromkeys([*expected_shapes, *shapes]):
        if shapes.get(path_below) != expected_shapes.get(path_below):
            in_both = path_below in shapes and path_below in expected_shapes
            words = [
                f"shape {x[path_below]}" if in_both else "an array" if path_below in x else "nothing"
                for x in (expected_shapes, shapes)
            ]
            of = TreeOf.OTHER_SHAPES if in_both else TreeOf.ANOTHER_MODEL
            return Difference(f"{path}/{path_below}".strip("/"), words[0], words[1], of)
    return None
