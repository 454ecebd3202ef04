"""The tensors of torch for the parameters of a model.

A parameter is one tensor, or a stack of them: then its name has a counter, ``layers.{i}.weight``, and there is a tensor
for each index. The shape of an array does not tell a stack, or a kernel of attention, from a convolution, nor a matrix
from its transposed one. So an array of two axes or more is refused, unless its name, the class of its module or a rule
tells its layout (`_layouts.py`). A tensor of torch that is read tells a kernel too: it belongs to one layer, and has as
many axes as the array only for a convolution.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.axes import list_axes
from reparax.core.axes_at import roles_of
from reparax.core.chain import Parametrization
from reparax.core.paths import PyTree, items, path_text
from reparax.core.where import match_paths, why_none_selected
from reparax.io._layouts import EXPERTS, LAYOUTS, axis_order, find_layout, layout_of, layouts_by_module, permute
from reparax.numerics.arithmetic import is_array

Rules = Mapping[str, str] | None

_RENAMED = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
ORTHOGONAL_MAPS = {"matrix_exp": "expm", "cayley": "cayley", "householder": "householder"}
"""The maps of torch's ``orthogonal``, in our words."""
_COUNTERS = ("i", "j")
"""What stands in a name for the index on the first axis, and on the second."""


def default_name(path: str) -> str:
    """The torch name of a parameter without a rule: the names of its path, the last one in torch's word."""
    *modules, name = path.split("/")
    return ".".join([*modules, _RENAMED.get(name, name)])


def _expand_name(path: str, shape: tuple[int, ...], match: re.Match[str], name: str) -> tuple[str, int]:
    """The name that a rule gives a parameter, and the number of its counters.

    Raises:
      ValueError: If it has other counters than there are axes, or asks for a group that the expression lacks.
    """
    counters = sorted(set(re.findall(r"\{(.*?)\}", name)))
    if tuple(counters) != _COUNTERS[: len(counters)]:
        raise ValueError(
            f"`names` gives {path!r} the name {name!r}, but takes {{i}} for the index on the first axis of a stack, "
            f"and {{i}} and {{j}} for those on the first two."
        )
    if len(counters) > len(shape):
        raise ValueError(f"`names` gives {path!r} the name {name!r}, but its shape {shape} has no axis for each index.")
    try:
        return match.expand(name).replace("/", "."), len(counters)  # a group may contain several parts of the path
    except (re.error, IndexError) as error:
        raise ValueError(f"cannot make a name of {name!r} for {path!r}: {error}.") from error


def given_words(
    paths: Sequence[str], words: str | Rules, argument: str, what: str, known: Sequence[str]
) -> dict[str, str]:
    """A word for each parameter for which a rule of an argument gives one, or one word for all."""
    if isinstance(words, str):
        word_of = dict.fromkeys(paths, words)
    else:
        word_of = {path: word for path, (word, *_) in _match_rules(paths, words, argument).items()}
    _require_words(word_of.values(), what, known)
    return word_of


def _require_words(words: Iterable[str], what: str, known: Sequence[str]) -> None:
    """Refuses words that are not known."""
    if wrong := [word for word in words if word not in known]:
        raise ValueError(f"got {wrong[0]!r} as a {what}, but takes one of {', '.join(map(repr, known))}.")


def _match_rules(paths: Sequence[str], rules: Any, what: str) -> dict[str, tuple[str, re.Match[str], int]]:
    """For each path that a rule matches, the value of the first such rule, the match, and the number of the rule."""
    rules = {} if rules is None else rules
    if not isinstance(rules, Mapping) or not all(isinstance(text, str) for rule in rules.items() for text in rule):
        raise ValueError(f"`{what}` takes a dict of regular expressions and, for each, a text, but got {rules!r}.")
    for pattern in set(rules) - set(paths):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`{what}` has {pattern!r}, which is not a regular expression: {error}.") from error
    match_of_path: dict[str, tuple[str, re.Match[str], int]] = {}
    for number, (pattern, value) in enumerate(rules.items()):
        new_matches = match_paths(pattern, paths)
        if not new_matches:
            raise ValueError(f"`{what}` matches nothing: {why_none_selected(pattern, paths)}")
        for match in new_matches:
            match_of_path.setdefault(match[0], (value, match, number))
    return match_of_path


Index = tuple[int, ...]
Stage = TypeVar("Stage", bound=Parametrization)
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Entry:
    """A tensor of torch.

    Attributes:
      path: The path of the parameter.
      tensor: The name in torch.
      shape: The shape of the array, without stacked axes.
      dtype: Its dtype.
      layout: Its layout, which relates its axes to torch's; if it is not known, that of one module of torch.
      known: Whether anything tells the layout.
      by_class: Whether the class of the module tells it.
      unlike_class: Whether a module holds the array of which it is not known how it computes.
      index: The index in the parameter, if that is a stack.
      rule: Which rule of ``names`` gave the name, if one did.
      orthogonal_map: What torch's ``orthogonal`` was called with, if the user says it.
      style: The style of its names in torch.
    """

    path: str
    tensor: str
    shape: tuple[int, ...]
    dtype: Any
    layout: str
    known: bool = True
    by_class: bool = False
    unlike_class: bool = False
    index: Index = ()
    rule: int | None = None
    orthogonal_map: str | None = None
    style: str = "parametrizations"

    def like(self, tensors: Iterable[Any]) -> Self:
        """This entry; its layout is known too if one of torch's own tensors tells a convolution.

        It does by its number of axes, unless a transposed one, with as many inputs as outputs, has the same shape, or
        a stack of experts.
        """
        other_layouts = ("conv_transpose", *((f"{EXPERTS}kernel", "same") if len(self.shape) == 3 else ()))
        could_be_another = permute(self.shape, "kernel") in [permute(self.shape, layout) for layout in other_layouts]
        return self if could_be_another else self.by_axes(tensors)

    def by_axes(self, tensors: Iterable[Any]) -> Self:
        """This entry; its layout is known too if a tensor tells a convolution, which cannot be a transposed one."""
        is_convolution = self.layout == "kernel" and any(x.ndim == len(self.shape) for x in tensors)
        return replace(self, known=self.known or is_convolution)

    def transposed(self) -> Self:
        """The entry of the transposed matrix, for the same tensor."""
        layout = "kernel" if axis_order(self.layout, 2) == (0, 1) else "same"
        return replace(self, shape=self.shape[::-1], layout=layout)

    def part(self, x: Any) -> Any:
        """This tensor's part of a stack, or the type of it."""
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape[len(self.index) :], x.dtype)
        if any(place >= size for place, size in zip(self.index, x.shape, strict=False)):
            raise ValueError(
                f"expected a value for each layer, got one of shape {x.shape}. Use `stacked` in its stage."
            )
        if not self.index or isinstance(x, Tracer):
            return x[self.index] if self.index else jnp.asarray(x)
        return jnp.asarray(np.asarray(x)[self.index])  # numpy compiles nothing for each index


def stack_parts(parts: Mapping[Index, Array]) -> Array:
    """The stack of these parts; the part itself if it is whole."""
    if () in parts:
        return parts[()]
    in_order = [parts[index] for index in sorted(parts)]
    sizes = (1 + max(places) for places in zip(*parts, strict=True))
    return jnp.stack(in_order).reshape(*sizes, *in_order[0].shape)


def unstack_stage(stage: Stage, count: int) -> Stage:
    """The stage on one array of a stack with ``count`` axes."""
    if count == 0:
        return stage
    axes = tuple(sorted(list_axes(getattr(stage, "stacked", ()))))
    if axes[:count] != tuple(range(count)):
        raise ValueError(
            f"`names` gives each layer a name, but {stage!r} does not act on each layer by itself. Give it "
            f"`stacked={0 if count == 1 else tuple(range(count))}`."
        )
    unstacked: Any = stage
    return replace(unstacked, stacked=tuple(axis - count for axis in axes[count:]))


def list_entries(
    tree: PyTree, names: Rules, layouts: Rules, roles: PyTree = None, by_stage: Mapping[str, str] | None = None
) -> list[Entry]:
    """The tensors for the parameters of ``tree``, one for each index of a stack whose name has counters.

    The layout of a parameter is what a rule of ``layouts`` says, or the class of its module, or its role, or the stage
    that makes it, ``by_stage`` for its path, or its name.
    """
    arrays = {path_text(keys): x for keys, x in items(tree) if is_array(x)}
    names_of_tensors = _names_of_tensors(arrays, names)
    layout_rules = {path: layout for path, (layout, *_) in _match_rules([*arrays], layouts, "layouts").items()}
    _require_words(layout_rules.values(), "layout", LAYOUTS)
    module_layouts = layouts_by_module(tree)
    role_of = {} if roles is None else {path_text(path): role for path, role in roles_of("roles", roles).items()}
    entries: list[Entry] = []
    for path, x in arrays.items():
        tensor, count, rule = names_of_tensors[path]
        by_rule, of_module = layout_rules.get(path), module_layouts.get(path)
        by_class = of_module is not None and of_module[0] is not None
        shape = tuple(x.shape[count:])
        is_by_role = path in role_of and by_rule is None and not by_class
        layout = layout_of(role_of[path], count) if is_by_role else None
        if by_rule is None and not by_class:
            layout = layout or (by_stage or {}).get(path)
        is_known = layout is not None
        if layout is None:
            layout, is_known = find_layout(path.split("/")[-1], shape, by_rule, of_module)
        unlike_class = of_module is not None and not by_class
        entry = Entry(path, tensor, shape, x.dtype, layout, is_known, by_class, unlike_class, rule=rule)
        indices = product(*map(range, x.shape[:count]))
        entries += [replace(entry, tensor=_number_name(tensor, index), index=index) for index in indices]
    entries = _with_merged_biases(entries)
    require_different_names((entry.tensor, entry.path) for entry in entries)
    return entries


def _with_merged_biases(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, where the bias beside a kernel of attention is a vector in torch, as the kernel's outputs are."""
    heads = {entry.path.rpartition("/")[0]: entry.shape[1:] for entry in entries if entry.layout == "to_heads"}
    return [
        replace(entry, layout="vector", known=True)
        if not entry.known and entry.path.endswith("bias") and heads.get(entry.path.rpartition("/")[0]) == entry.shape
        else entry
        for entry in entries
    ]


def _names_of_tensors(arrays: Mapping[str, Any], names: Rules) -> dict[str, tuple[str, int, int | None]]:
    """For each path the name of its tensors, how many counters it has, and which rule gave it, if one did."""
    tensors: dict[str, tuple[str, int, int | None]] = {path: (default_name(path), 0, None) for path in arrays}
    for path, (name, match, rule) in _match_rules([*arrays], names, "names").items():
        tensors[path] = *_expand_name(path, tuple(arrays[path].shape), match, name), rule
    return tensors


def _number_name(name: str, index: Index) -> str:
    """The name with an index in the place of its counters."""
    for counter, number in zip(_COUNTERS, index, strict=False):
        name = name.replace(f"{{{counter}}}", str(number))
    return name


def require_different_names(paths_by_name: Iterable[tuple[str, str]]) -> None:
    """Refuses names that two parameters have, or values of them; each name comes with the path of its parameter."""
    owners: dict[str, str] = {}
    for name, path in paths_by_name:
        owner = owners.setdefault(name, path)
        if owner != path:
            raise ValueError(f"{owner!r} and {path!r} are both called {name!r}. Give different `names`.")


def require_known(entries: Iterable[Entry]) -> None:
    """Refuses tensors whose layout nothing tells."""
    doubtful = {entry.path: entry for entry in entries if not entry.known}
    if not doubtful:
        return
    path, shape = next((entry.path, entry.shape) for entry in doubtful.values())
    other_paths = ", ".join(repr(other_path) for other_path in doubtful if other_path != path)
    more = f" (as unclear: {other_paths})" if other_paths else ""
    if len(shape) == 2:
        raise ValueError(
            f"neither a name nor a class determines the axes of {path!r}, which has shape {shape}{more}. Give its "
            f"layout: layouts={{{path!r}: 'kernel'}} for a matrix (in, out), 'same' for one (out, in), 'conv1d' for "
            f"one that is (in, out) in torch too, or 'embedding' for a table. For a stack of vectors, give each a "
            f"name: {names_by_layer(path)}. For a bias of attention, layouts={{{path!r}: 'vector'}}."
        )
    layouts = f"layouts={{{path!r}: 'experts:kernel'}}, or 'experts:conv1d' for equal axes in torch. "
    experts = f"For experts in one tensor, {layouts}" if len(shape) == 3 else ""
    heads = " For attention, 'to_heads' for (in, heads, dim), or 'from_heads' for (heads, dim, out)."
    heads = heads if len(shape) == 3 else ""
    raise ValueError(
        f"the shape {shape} of {path!r} does not show whether it is a stack of layers, a convolution or a kernel of "
        f"attention{more}. For a stack, give each layer a name: {names_by_layer(path)}. {experts}For a "
        f"convolution, layouts={{{path!r}: 'kernel'}}, or 'conv_transpose'; for equal axes in torch, 'same'.{heads}"
    )


def names_by_layer(path: str) -> str:
    """The argument that gives each layer of a stack a name."""
    head, *tail = default_name(path).split(".")
    return f"names={{{path!r}: {'.'.join([head, '{i}', *tail] if tail else ['{i}', head])!r}}}"


def group_keys(values: Mapping[Key, Value]) -> dict[Value, list[Key]]:
    """For each value, all keys that have it."""
    keys_of: dict[Value, list[Key]] = {}
    for key, value in values.items():
        keys_of.setdefault(value, []).append(key)
    return keys_of


_ANY_NAME = "[^/]+"


def pattern_of(paths: Iterable[str], known_paths: Collection[str]) -> str:
    """An expression for ``where`` that selects exactly these paths of those that are known."""
    paths_by_length = group_keys({path: path.count("/") for path in sorted(paths)})
    return "|".join(_of_one_length(paths_of_length, known_paths) for paths_of_length in paths_by_length.values())


def _of_one_length(paths: list[str], known_paths: Collection[str]) -> str:
    """The expression for paths of the same number of names: any name, if that selects no other path."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(path.split("/") for path in paths), strict=True)]
    alternatives = ("|".join(map(re.escape, column)) for column in columns)
    names = [x if len(column) == 1 else f"({x})" for x, column in zip(alternatives, columns, strict=True)]

    def is_exact(pattern: str) -> bool:
        return {path for path in known_paths if re.fullmatch(pattern, path)} == set(paths)

    if not is_exact("/".join(names)):
        return "|".join(map(re.escape, paths))
    for i, column in enumerate(columns):
        wider = [*names[:i], _ANY_NAME, *names[i + 1 :]]
        names = wider if len(column) > 1 and is_exact("/".join(wider)) else names
    pattern = "/".join(names)
    short = re.sub(rf"{re.escape(_ANY_NAME)}(/{re.escape(_ANY_NAME)})*", ".*", pattern)
    selects_values = any(re.fullmatch(short, f"{path}/g") for path in paths)  # of another stage, such as a length
    return short if is_exact(short) and not selects_values else pattern
