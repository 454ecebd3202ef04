"""Finds the torch tensors that correspond to the parameters of a model.

An :class:`Entry` describes one torch tensor, and most parameters have one entry. If a parameter stacks layers that are
separate tensors in torch, its torch name has a counter, as in ``layers.{i}.weight``, and each index has an entry.

The shape of an array does not show whether it is a stack, an attention kernel or a convolution, or whether a matrix is
transposed. Therefore, an array with two or more axes is rejected unless its layout (``_layouts.py``) is known. The
tensors of a state dict may also show the layout. Apart from stacks of experts, an array with three or more axes has the
same number of axes in torch only if it is a convolution, because torch stores layers separately and merges heads.
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
from reparax.io._layouts import LAYOUTS, axis_order, find_layout, layout_by_role, module_layouts, torch_shape
from reparax.numerics.arithmetic import is_array

Rules = Mapping[str, str] | None

_TORCH_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
ORTHOGONAL_MAPS = {"matrix_exp": "expm", "cayley": "cayley", "householder": "householder"}
"""Maps each ``orthogonal_map`` of torch's ``orthogonal`` to the equivalent ``map`` of :class:`Orthogonal`."""
_COUNTERS = ("i", "j")
"""The counters that a torch name may contain: ``{i}`` for the first axis of a stack, ``{j}`` for the second."""


def default_name(path: str) -> str:
    """Returns the torch name of a parameter that no rule of ``names`` matches: ``dense/kernel -> dense.weight``."""
    *modules, name = path.split("/")
    return ".".join([*modules, _TORCH_NAMES.get(name, name)])


def _expand_name(path: str, shape: tuple[int, ...], match: re.Match[str], name: str) -> tuple[str, int]:
    """Returns the torch name that a rule gives a parameter, and how many counters, such as ``{i}``, the name contains.

    Raises:
      ValueError: If the name has unknown counters, more counters than the array has axes, or a reference to a group
        that the regular expression lacks.
    """
    counters = sorted(set(re.findall(r"\{(.*?)\}", name)))
    if tuple(counters) != _COUNTERS[: len(counters)]:
        raise ValueError(
            f"`names` gives {path!r} the torch name {name!r}, but a name must contain {{i}} for a stack along the "
            f"first axis, {{i}} and {{j}} for a stack along the first two, or no braces. Rename the counters."
        )
    if len(counters) > len(shape):
        raise ValueError(
            f"`names` gives {path!r} the torch name {name!r} with {len(counters)} counters, but its shape is {shape}. "
            f"Write a counter only for each axis along which layers are stacked."
        )
    try:
        return match.expand(name).replace("/", "."), len(counters)  # A matched group may contain slashes.
    except (re.error, IndexError) as error:
        raise ValueError(f"`names` cannot expand the torch name {name!r} for {path!r}: {error}.") from error


def choices_by_path(
    paths: Sequence[str], choices: str | Rules, argument: str, what: str, known: Sequence[str]
) -> dict[str, str]:
    """Maps the path of each parameter to its choice for an argument such as ``style``.

    ``choices`` is one choice for all parameters, or a dict of rules, from regular expressions for paths to choices. The
    first rule that matches a path determines its choice. Paths that no rule matches are left out.
    """
    if isinstance(choices, str):
        choice_of = dict.fromkeys(paths, choices)
    else:
        choice_of = {path: choice for path, (choice, *_) in _match_rules(paths, choices, argument).items()}
    _require_choices(choice_of.values(), what, known)
    return choice_of


def _require_choices(choices: Iterable[str], what: str, known: Sequence[str]) -> None:
    """Raises an error if a choice is not in ``known``."""
    if wrong := [choice for choice in choices if choice not in known]:
        raise ValueError(f"a {what} must be one of {', '.join(map(repr, known))}, but got {wrong[0]!r}.")


def _match_rules(paths: Sequence[str], rules: Any, what: str) -> dict[str, tuple[str, re.Match[str], int]]:
    """Maps each path that a rule matches to the value, the match object and the index of the first such rule."""
    rules = {} if rules is None else rules
    if not isinstance(rules, Mapping) or not all(isinstance(text, str) for rule in rules.items() for text in rule):
        raise ValueError(f"`{what}` must be a dict from regular expressions to strings, but got {rules!r}.")
    for pattern in set(rules) - set(paths):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`{what}` has {pattern!r}, which is not a regular expression: {error}.") from error
    match_of_path: dict[str, tuple[str, re.Match[str], int]] = {}
    for number, (pattern, value) in enumerate(rules.items()):
        new_matches = match_paths(pattern, paths)
        if not new_matches:
            raise ValueError(f"a rule of `{what}` matches no parameter: {why_none_selected(pattern, paths)}")
        for match in new_matches:
            match_of_path.setdefault(match[0], (value, match, number))
    return match_of_path


Index = tuple[int, ...]
Stage = TypeVar("Stage", bound=Parametrization)
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Entry:
    """A torch tensor that holds a parameter, or one layer of a stacked parameter.

    Attributes:
      path: The path of the parameter.
      tensor: The name of the tensor in torch.
      shape: The shape of the JAX array, without the axes along which layers are stacked.
      dtype: The dtype of the JAX array.
      layout: The layout, which relates JAX axes to torch axes. It is only a guess if ``is_known`` is False.
      is_known: Whether the layout is certain.
      by_class: Whether the class of the array's module determines the layout.
      in_unknown_module: Whether the array belongs to a module whose computation is unknown.
      index: The index of the layer if the parameter is a stack, and empty otherwise.
      rule: The index of the rule in ``names`` that determines the tensor's name; None for a default name.
      orthogonal_map: The map that torch's ``orthogonal`` was called with, or None if the user does not specify it.
      style: How torch names the values of stages: one of the styles of ``to_torch``.
    """

    path: str
    tensor: str
    shape: tuple[int, ...]
    dtype: Any
    layout: str
    is_known: bool = True
    by_class: bool = False
    in_unknown_module: bool = False
    index: Index = ()
    rule: int | None = None
    orthogonal_map: str | None = None
    style: str = "parametrizations"

    @property
    def has_other_order(self) -> bool:
        """Whether the axes are in another order in torch than in JAX, as for a transposed matrix."""
        return axis_order(self.layout, len(self.shape)) != tuple(range(len(self.shape)))

    def confirm_unambiguous_kernel(self, tensors: Iterable[Any]) -> Self:
        """Returns the entry, with its layout marked as known if ``tensors`` show that the JAX array is a convolution.

        The number of axes of a tensor identifies a convolution, except where a transposed convolution or a stack of
        experts has the same shape. A transposed convolution has it if the numbers of inputs and outputs are equal.
        """
        other_layouts = ("conv_transpose", *(("same",) if len(self.shape) == 3 else ()))
        other_shapes = [torch_shape(self.shape, layout) for layout in other_layouts]
        return self if torch_shape(self.shape, "kernel") in other_shapes else self.confirm_kernel(tensors)

    def confirm_kernel(self, tensors: Iterable[Any]) -> Self:
        """Returns the entry; marks its layout ``kernel`` as known if a tensor has as many axes as the JAX array.

        Call this only if the array cannot be the kernel of a transposed convolution.
        """
        is_convolution = self.layout == "kernel" and any(x.ndim == len(self.shape) for x in tensors)
        return replace(self, is_known=self.is_known or is_convolution)

    def transposed(self) -> Self:
        """Returns an entry for the transpose of the JAX matrix, held by the same torch tensor."""
        layout = "same" if self.has_other_order else "kernel"
        return replace(self, shape=self.shape[::-1], layout=layout)

    def slice_of(self, x: Any) -> Any:
        """Returns the layer of a stacked array or ``ShapeDtypeStruct`` that this entry's torch tensor holds."""
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape[len(self.index) :], x.dtype)
        if any(place >= size for place, size in zip(self.index, x.shape, strict=False)):
            raise ValueError(
                f"a stage on a stack must have values for each layer, but a value has shape {x.shape}. Pass `stacked` "
                f"to the stage, such as `stacked=0`."
            )
        if not self.index or isinstance(x, Tracer):
            return x[self.index] if self.index else jnp.asarray(x)
        return jnp.asarray(np.asarray(x)[self.index])  # Unlike JAX, NumPy does not compile a program for each index.


def stack_parts(parts: Mapping[Index, Array]) -> Array:
    """Stacks layers, keyed by index, into one array. Returns an array with the empty index ``()`` unchanged."""
    if () in parts:
        return parts[()]
    in_order = [parts[index] for index in sorted(parts)]
    sizes = (1 + max(places) for places in zip(*parts, strict=True))
    return jnp.stack(in_order).reshape(*sizes, *in_order[0].shape)


def unstack_stage(stage: Stage, count: int) -> Stage:
    """Converts a stage on layers stacked along the first ``count`` axes to the equivalent stage on a single layer."""
    if count == 0:
        return stage
    axes = tuple(sorted(list_axes(getattr(stage, "stacked", ()))))
    if axes[:count] != tuple(range(count)):
        raise ValueError(
            f"`names` gives each layer a torch name, but {stage!r} does not act on each layer separately. Pass "
            f"`stacked={0 if count == 1 else tuple(range(count))}` to the stage."
        )
    unstacked: Any = stage
    return replace(unstacked, stacked=tuple(axis - count for axis in axes[count:]))


def list_entries(
    tree: PyTree, names: Rules, layouts: Rules, roles: PyTree = None, by_stage: Mapping[str, str] | None = None
) -> list[Entry]:
    """Lists an :class:`Entry` for each torch tensor that holds a parameter of ``tree``, or one layer of a stack.

    The layout of a parameter is determined by the first of these that applies:

    1. a rule of ``layouts``;
    2. the class of the parameter's module;
    3. the parameter's role;
    4. the stage that produces the parameter (``by_stage`` maps paths to such layouts);
    5. the parameter's name.
    """
    arrays = {path_text(keys): x for keys, x in items(tree) if is_array(x)}
    names_of_tensors = _names_of_tensors(arrays, names)
    layout_rules = {path: layout for path, (layout, *_) in _match_rules([*arrays], layouts, "layouts").items()}
    _require_choices(layout_rules.values(), "layout", LAYOUTS)
    layout_of_module = module_layouts(tree)
    role_of = {} if roles is None else {path_text(path): role for path, role in roles_of("roles", roles).items()}
    entries: list[Entry] = []
    for path, x in arrays.items():
        tensor, count, rule = names_of_tensors[path]
        by_rule, of_module = layout_rules.get(path), layout_of_module.get(path)
        by_class = of_module is not None and of_module[0] is not None
        shape = tuple(x.shape[count:])
        layout = None
        if by_rule is None and not by_class:
            by_role = layout_by_role(role_of[path], count) if path in role_of else None
            layout = by_role or (by_stage or {}).get(path)
        found = (layout, True) if layout else find_layout(path.split("/")[-1], shape, by_rule, of_module)
        in_unknown_module = of_module is not None and not by_class
        entry = Entry(path, tensor, shape, x.dtype, *found, by_class, in_unknown_module, rule=rule)
        indices = product(*map(range, x.shape[:count]))
        entries += [replace(entry, tensor=_fill_counters(tensor, index), index=index) for index in indices]
    entries = _with_merged_biases(entries)
    require_unique_names((entry.tensor, entry.path) for entry in entries)
    return entries


def _with_merged_biases(entries: Sequence[Entry]) -> list[Entry]:
    """Sets the layout of attention biases ``(heads, dim)`` to ``"vector"``, because torch merges their two axes."""
    heads = {x.path.rpartition("/")[0]: x.shape[1:] for x in entries if x.layout == "to_heads"}
    return [
        replace(x, layout="vector", is_known=True)
        if not x.is_known and x.path.endswith("bias") and heads.get(x.path.rpartition("/")[0]) == x.shape
        else x
        for x in entries
    ]


def _names_of_tensors(arrays: Mapping[str, Any], names: Rules) -> dict[str, tuple[str, int, int | None]]:
    """Maps each path to its torch name, the number of counters in this name, and the index of its rule, or None."""
    tensors: dict[str, tuple[str, int, int | None]] = {path: (default_name(path), 0, None) for path in arrays}
    for path, (name, match, rule) in _match_rules([*arrays], names, "names").items():
        tensors[path] = *_expand_name(path, tuple(arrays[path].shape), match, name), rule
    return tensors


def _fill_counters(name: str, index: Index) -> str:
    """Replaces the counters in a name with an index: ``layers.{i}.weight -> layers.3.weight``."""
    for counter, number in zip(_COUNTERS, index, strict=False):
        name = name.replace(f"{{{counter}}}", str(number))
    return name


def require_unique_names(paths_by_name: Iterable[tuple[str, str]]) -> None:
    """Raises an error if two parameters have the same name in torch.

    ``paths_by_name`` consists of ``(name, path)`` pairs: a parameter's name in torch and its path in the tree.
    """
    owners: dict[str, str] = {}
    for name, path in paths_by_name:
        owner = owners.setdefault(name, path)
        if owner != path:
            raise ValueError(f"{owner!r} and {path!r} are both called {name!r} in torch. Give them different `names`.")


def require_layouts(entries: Iterable[Entry]) -> None:
    """Raises an error that lists the possible layouts if the layout of an array is unknown."""
    doubtful = {entry.path: entry for entry in entries if not entry.is_known}
    if not doubtful:
        return
    path, shape = next((entry.path, entry.shape) for entry in doubtful.values())
    other_paths = ", ".join(repr(other_path) for other_path in doubtful if other_path != path)
    more = f" (equally unclear: {other_paths})" if other_paths else ""
    if len(shape) == 2:
        raise ValueError(
            f"neither a name nor a class determines the axes of {path!r}, which has shape {shape}{more}. Pass its "
            f"layout: layouts={{{path!r}: 'kernel'}} for a matrix (in, out), 'same' for a matrix (out, in), 'conv1d' "
            f"for a matrix that is (in, out) in torch too, or 'embedding' for a table. For a stack of vectors, give "
            f"each a name: {per_layer_names(path)}. For a bias of attention heads, layouts={{{path!r}: 'vector'}}."
        )
    layouts = f"layouts={{{path!r}: 'experts:kernel'}}, or 'experts:conv1d' if torch has the same axes"
    experts = f"For experts in one tensor, {layouts}. " if len(shape) == 3 else ""
    heads = " For attention, 'to_heads' for (in, heads, dim), or 'from_heads' for (heads, dim, out)."
    heads = heads if len(shape) == 3 else ""
    raise ValueError(
        f"the shape {shape} of {path!r} does not show whether it is a stack of layers, a convolution or an attention "
        f"kernel{more}. For a stack, give each layer a name: {per_layer_names(path)}. {experts}For a convolution, "
        f"layouts={{{path!r}: 'kernel'}}, or 'conv_transpose', or 'same' if torch has the same axes.{heads}"
    )


def per_layer_names(path: str) -> str:
    """Returns the code of a ``names`` argument that names each layer of a stack, for error messages."""
    head, *tail = default_name(path).split(".")
    return f"names={{{path!r}: {'.'.join([head, '{i}', *tail] if tail else ['{i}', head])!r}}}"


def group_keys(values: Mapping[Key, Value]) -> dict[Value, list[Key]]:
    """Groups the keys of a dict by their values: ``{"a": 1, "b": 1} -> {1: ["a", "b"]}``."""
    keys_of: dict[Value, list[Key]] = {}
    for key, value in values.items():
        keys_of.setdefault(value, []).append(key)
    return keys_of


_ANY_NAME = "[^/]+"


def pattern_of(paths: Iterable[str], known_paths: Collection[str]) -> str:
    """Returns a regular expression for ``where`` that matches exactly ``paths`` among ``known_paths``."""
    paths_by_length = group_keys({path: path.count("/") for path in sorted(paths)})
    return "|".join(_pattern_of_one_depth(paths_of_length, known_paths) for paths_of_length in paths_by_length.values())


def _pattern_of_one_depth(paths: list[str], known_paths: Collection[str]) -> str:
    """Returns a regular expression for paths of equal depth, with wildcards if they match no other known path."""
    columns = [dict.fromkeys(column) for column in zip(*(path.split("/") for path in paths), strict=True)]
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
    # The short pattern must not match the path of a stage's value either, such as `kernel/g` for norms.
    selects_values = any(re.fullmatch(short, f"{path}/g") for path in paths)
    return short if is_exact(short) and not selects_values else pattern
