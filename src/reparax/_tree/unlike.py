"""Trees that should be alike: the first place at which one differs from the other, for errors."""

from dataclasses import dataclass, replace

from reparax._tree.differences import by_parameter
from reparax._tree.paths import PyTree


@dataclass(frozen=True)
class Difference:
    """Where a tree differs from the one that is wanted.

    Attributes:
      path: The path.
      wanted: What should be there, in words.
      got: What is there, in words.
      of: What the tree is one of: ``"the model"``, if it has arrays where a raw tree has markers; ``"a raw tree"``, if
        it is the other way round; ``"another chain"``, ``"another model"`` or ``"other shapes"``.
    """

    path: str
    wanted: str
    got: str
    of: str

    @property
    def swapped(self) -> "Difference":
        """The same, if it is the other tree that is wrong."""
        return replace(self, wanted=self.got, got=self.wanted)

    def __str__(self) -> str:
        return f"expected {self.wanted} at {self.path!r}, got {self.got}"


def difference(got: PyTree, wanted: PyTree) -> Difference | None:
    """The first difference between the arrays of two trees; another stage comes before all others."""
    here, there = (by_parameter(tree, lambda x: tuple(x.shape), empty=False) for tree in (got, wanted))
    for path in there:
        if path in here and (found := _of_stages(path, here[path], there[path])) is not None:
            return found
    pairs = [(path, here.get(path, {}), there.get(path, {})) for path in dict.fromkeys([*there, *here])]
    return next((found for each in pairs if (found := _of_values(*each)) is not None), None)


def _of_stages(path: str, here: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]]) -> Difference | None:
    got, wanted = (next(iter(each)).split("/")[0] for each in (here, there))
    if got == wanted:
        return None
    of = "another chain" if got and wanted else "the model" if wanted else "a raw tree"
    return Difference(path, repr(wanted) if wanted else "an array", repr(got) if got else "an array", of)


def _of_values(path: str, here: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]]) -> Difference | None:
    for rest in dict.fromkeys([*there, *here]):
        if here.get(rest) != there.get(rest):
            got, wanted = (f"shape {each[rest]}" if rest in each else "nothing" for each in (here, there))
            of = "other shapes" if rest in here and rest in there else "another model"
            if of == "another model":
                got, wanted = ("nothing" if each == "nothing" else "an array" for each in (got, wanted))
            return Difference(f"{path}/{rest}".strip("/"), wanted, got, of)
    return None
