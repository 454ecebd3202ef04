"""The inputs of the arrays of a tree, as ``init`` takes them."""

from collections.abc import Mapping, Sequence
from typing import Any

from reparax._data.seen import ANY, Seen
from reparax._tree.flat import Flat
from reparax._tree.paths import Names, PyTree, flatten_with_names, is_array, path_text


def seen_by_place(who: str, tree: Flat, seen: PyTree) -> Mapping[Names, Seen]:
    """The inputs of each array of ``tree``, from one or several trees of :class:`Seen`."""
    if seen is None:
        return {}
    if seen is ANY:
        return {place: seen for place, x in tree.arrays.items() if is_array(x)}
    trees = [_entries_by_place(who, seen)]
    if isinstance(seen, Sequence) and not trees[0].keys() <= tree.arrays.keys():
        trees = [_entries_by_place(who, part) for part in seen]
    entry_at: dict[Names, Seen] = {}
    for place, entry in (item for part in trees for item in part.items()):
        if place not in tree.arrays:
            some_paths = ", ".join(repr(path_text(part)) for part in list(tree.arrays)[:3])
            raise ValueError(
                f"{who} got seen for {path_text(place)!r}, which is not an array of the parameters: these have "
                f"{some_paths}. Pass the result of `rpx.inputs` for the same parameters."
            )
        entry_at[place] = entry_at[place].joined(entry) if place in entry_at else entry
    return entry_at


def takes_data(stage: Any) -> bool:
    """Whether ``init`` of a stage takes the inputs of arrays."""
    return stage._sees


def _entries_by_place(who: str, seen: PyTree) -> dict[Names, Seen]:
    """The entries of one tree of :class:`Seen`, by place; raises if a leaf is anything else."""
    paths, nodes, _ = flatten_with_names(seen, _is_seen)
    if odd := [x for x in nodes if not _is_seen(x)]:
        raise TypeError(
            f"{who} takes a tree of `rpx.seen.Seen` as seen, but got {_describe_leaf(odd[0])}. Pass the result of "
            f"`rpx.inputs(loss)(params, batch)`."
        )
    return dict(zip(paths, nodes, strict=True))


def _describe_leaf(x: Any) -> str:
    """A leaf that is no entry, in an error."""
    return f"an array of shape {x.shape}" if is_array(x) else f"{x!r} of type {type(x).__name__}"


def _is_seen(x: object) -> bool:
    """Whether a node of a tree is an entry, which flattening leaves whole."""
    return isinstance(x, Seen)
