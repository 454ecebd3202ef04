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
from reparax.core.chain import Parametrization
from reparax.core.paths import PyTree, items, path_text
from reparax.core.where import matches, why_nothing
from reparax.io._layouts import EXPERTS, LAYOUTS, find_layout, layout_of, layouts_by_module, permute, roles_by_path
from reparax.numerics.arithmetic import is_array

Rules = Mapping[str, str] | None

_RENAMED = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
ORTHOGONAL_MAPS = {"matrix_exp": "expm", "cayley": "cayley", "householder": "householder"}
"""The maps of torch's ``orthogonal``, in our words."""
_COUNTERS = ("i", "j")
"""What stands in a name for the index on the first axis, and on the second."""


def name_tensors(shapes: Mapping[str, tuple[int, ...]], names: Rules) -> dict[str, tuple[int, str, int | None]]:
    """For each parameter, the number of its stacked axes, its torch name with a counter for each, and its rule."""
    names_of_paths: dict[str, tuple[int, str, int | None]] = {path: (0, default_name(path), None) for path in shapes}
    places = {pattern: place for place, pattern in enumerate(names or {})}
    for path, (match, pattern, name) in _match_rules(list(shapes), names or {}, "names").items():
        names_of_paths[path] = _count_counters(path, shapes[path], name), _expand_name(match, name), places[pattern]
    return names_of_paths


def number_tensor(tensor: str, index: Sequence[int]) -> str:
    """A torch name with numbers for its counters."""
    for counter, number in zip(_COUNTERS, index, strict=False):
        tensor = tensor.replace(f"{{{counter}}}", str(number))
    return tensor


def default_name(path: str) -> str:
    """The torch name of a parameter without a rule: the names of its path, the last one in torch's word."""
    *modules, name = path.split("/")
    return ".".join([*modules, _RENAMED.get(name, name)])


def _count_counters(path: str, shape: tuple[int, ...], name: str) -> int:
    """The number of counters in a name."""
    counters = sorted(set(re.findall(r"\{(.*?)\}", name)))
    if tuple(counters) != _COUNTERS[: len(counters)]:
        raise ValueError(
            f"`names` gives {path!r} the name {name!r}, but takes {{i}} for the index on the first axis of a stack, "
            f"and {{i}} and {{j}} for those on the first two."
        )
    if len(counters) > len(shape):
        raise ValueError(f"`names` gives {path!r} the name {name!r}, but its shape {shape} has no axis for each index.")
    return len(counters)


def _expand_name(match: re.Match[str], name: str) -> str:
    """The name that a rule gives; raises an error if it asks for a group that the expression lacks."""
    try:
        return match.expand(name).replace("/", ".")  # a group may contain several parts of the path
    except (re.error, IndexError) as error:
        raise ValueError(f"cannot make a name of {name!r} for {match[0]!r}: {error}.") from error


def given_layouts(paths: Sequence[str], layouts: Rules) -> dict[str, str]:
    """The layout of each parameter for which a rule gives one."""
    rule_of_path = _match_rules(paths, layouts or {}, "layouts")
    for _, _, layout in rule_of_path.values():
        if layout not in LAYOUTS:
            layout_names = ", ".join(map(repr, LAYOUTS))
            raise ValueError(f"got {layout!r} as a layout, but takes one of {layout_names}.")
    return {path: layout for path, (_, _, layout) in rule_of_path.items()}


def given_maps(paths: Sequence[str], maps: str | Rules) -> dict[str, str]:
    """What torch's ``orthogonal`` was called with for each parameter, where a rule or one word for all says it."""
    known = ("default", *ORTHOGONAL_MAPS)
    if isinstance(maps, str):
        given = dict.fromkeys(paths, maps)
    else:
        given = {path: value for path, (_, _, value) in _match_rules(paths, maps or {}, "orthogonal_map").items()}
    if wrong := [value for value in given.values() if value not in known]:
        raise ValueError(f"got {wrong[0]!r} as a map of torch, but takes one of {', '.join(map(repr, known))}.")
    return given


def _check_rules(paths: Sequence[str], rules: Any, what: str) -> Mapping[str, str]:
    """``rules``, if they are regular expressions, or paths, and a text for each."""
    if not isinstance(rules, Mapping) or not all(isinstance(text, str) for rule in rules.items() for text in rule):
        raise ValueError(f"`{what}` takes a dict of regular expressions and, for each, a text, but got {rules!r}.")
    for pattern in set(rules) - set(paths):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`{what}` has {pattern!r}, which is not a regular expression: {error}.") from error
    return rules


def _match_rules(
    paths: Sequence[str], rules: Mapping[str, str], what: str
) -> dict[str, tuple[re.Match[str], str, str]]:
    """For each path that a rule matches, the match, and the first such rule: its expression and its value."""
    match_of_path: dict[str, tuple[re.Match[str], str, str]] = {}
    for pattern, value in _check_rules(paths, rules, what).items():
        new_matches = matches(pattern, paths)
        if not new_matches:
            raise ValueError(f"`{what}` matches nothing: {why_nothing(pattern, paths)}")
        match_of_path = {match[0]: (match, pattern, value) for match in new_matches} | match_of_path
    return match_of_path


Index = tuple[int, ...]
Stage = TypeVar("Stage", bound=Parametrization)


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
      index: The index in the parameter, if that is a stack.
      rule: Which rule of ``names`` gave the name, if one did.
      orthogonal_map: What torch's ``orthogonal`` was called with, if the user says it.
    """

    path: str
    tensor: str
    shape: tuple[int, ...]
    dtype: Any
    layout: str
    known: bool = True
    by_class: bool = False
    index: Index = ()
    rule: int | None = None
    orthogonal_map: str | None = None

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


def restack_stage(stage: Any, count: int) -> Any:
    """The stage on a stack with ``count`` axes, which acts on each array as ``stage`` does."""
    axes = (axis + count for axis in list_axes(stage.stacked))
    return replace(stage, stacked=(*range(count), *axes))


def list_entries(tree: PyTree, names: Rules, layouts: Rules, roles: PyTree = None) -> list[Entry]:
    """The tensors for the parameters of ``tree``."""
    arrays = {path_text(keys): x for keys, x in items(tree) if is_array(x)}
    name_of_path = name_tensors({path: tuple(x.shape) for path, x in arrays.items()}, names)
    layout_of_rule = given_layouts(list(arrays), layouts)
    of_classes = layouts_by_module(tree)
    role_of = roles_by_path(roles)
    entries: list[Entry] = []
    for path, x in arrays.items():
        count, tensor, rule = name_of_path[path]
        shape, name = tuple(x.shape[count:]), path.split("/")[-1]
        by_role = (
            layout_of(role_of[path], count)
            if path in role_of and path not in {**layout_of_rule, **of_classes}
            else None
        )
        layout, is_known = (
            (by_role, True) if by_role else find_layout(name, shape, layout_of_rule.get(path), of_classes.get(path))
        )
        entry = Entry(path, tensor, shape, x.dtype, layout, is_known, path in of_classes, rule=rule)
        for index in product(*map(range, x.shape[:count])):
            entries.append(replace(entry, tensor=number_tensor(tensor, index), index=index))
    _require_names_differ(entries)
    return entries


def require_known(entries: Iterable[Entry]) -> None:
    """Refuses tensors whose layout nothing tells."""
    doubtful = {entry.path: entry for entry in entries if not entry.known}
    if not doubtful:
        return
    path, shape = next((entry.path, entry.shape) for entry in doubtful.values())
    other_paths = ", ".join(repr(other_path) for other_path in doubtful if other_path != path)
    more = f" (as unclear: {other_paths})" if other_paths else ""
    raise ValueError(_explain_matrix(path, shape, more) if len(shape) == 2 else _explain_more_axes(path, shape, more))


def _explain_matrix(path: str, shape: tuple[int, ...], more: str) -> str:
    """Why the layout of a matrix is not known, and what to write."""
    return (
        f"neither a name nor a class determines the axes of {path!r}, which has shape {shape}{more}. Give its layout: "
        f"layouts={{{path!r}: 'kernel'}} for a matrix (in, out), 'same' for one (out, in), 'conv1d' for one that is "
        f"(in, out) in torch too, or 'embedding' for a table. For a stack of vectors, give each a name: "
        f"{names_by_layer(path)}. Reshape a bias of attention to a vector."
    )


def _explain_more_axes(path: str, shape: tuple[int, ...], more: str) -> str:
    """Why the layout of an array of three or more axes is not known, and what to write."""
    layouts = f"layouts={{{path!r}: 'experts:kernel'}}, or 'experts:conv1d' for equal axes in torch. "
    experts = f"For experts in one tensor, {layouts}" if len(shape) == 3 else ""
    return (
        f"the shape {shape} of {path!r} does not show whether it is a stack of layers, a convolution or a kernel of "
        f"attention{more}. For a stack, give each layer a name: {names_by_layer(path)}. {experts}For a "
        f"convolution, layouts={{{path!r}: 'kernel'}}, or 'conv_transpose'; for equal axes in torch, 'same'. Reshape "
        f"kernels and biases of attention to matrices and vectors."
    )


def names_by_layer(path: str) -> str:
    """The argument that gives each layer of a stack a name."""
    head, *tail = default_name(path).split(".")
    return f"names={{{path!r}: {'.'.join([head, '{i}', *tail] if tail else ['{i}', head])!r}}}"


def _require_names_differ(entries: list[Entry]) -> None:
    """Raises an error if two parameters have one name in torch."""
    owners: dict[str, str] = {}
    for entry in entries:
        if owners.setdefault(entry.tensor, entry.path) != entry.path:
            owners_text = f"{owners[entry.tensor]!r} and {entry.path!r}"
            raise ValueError(f"{owners_text} are both called {entry.tensor!r}. Give different `names`.")


_ANY_NAME = "[^/]+"


def pattern_of(paths: Iterable[str], known_paths: Collection[str]) -> str:
    """An expression for ``where`` that selects exactly these paths of those that are known."""
    by_length: dict[int, list[str]] = {}
    for path in sorted(paths):
        by_length.setdefault(path.count("/"), []).append(path)
    return "|".join(_of_one_length(paths_of_length, known_paths) for paths_of_length in by_length.values())


def _of_one_length(paths: list[str], known_paths: Collection[str]) -> str:
    """The expression for paths of the same number of names: any name, if that selects no other path."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(path.split("/") for path in paths), strict=True)]
    names = [_any_of(column) for column in columns]

    def exact(pattern: str) -> bool:
        return {path for path in known_paths if re.fullmatch(pattern, path)} == set(paths)

    if not exact("/".join(names)):
        return "|".join(map(re.escape, paths))
    for i, column in enumerate(columns):
        wider = [*names[:i], _ANY_NAME, *names[i + 1 :]]
        names = wider if len(column) > 1 and exact("/".join(wider)) else names
    plain = "/".join(names)
    short = re.sub(rf"{re.escape(_ANY_NAME)}(/{re.escape(_ANY_NAME)})*", ".*", plain)
    return short if exact(short) else plain


def _any_of(names: list[str]) -> str:
    """An expression for any of these names, and nothing else."""
    return re.escape(names[0]) if len(names) == 1 else f"({'|'.join(map(re.escape, names))})"
