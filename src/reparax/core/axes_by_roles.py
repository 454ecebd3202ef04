"""The axes of a stage where a network says what they are: as words become numbers, and where they do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax

from reparax.core.axes import EACH, LAST, are_words, find_axes, one_stacked, words_to_numbers
from reparax.core.calls import CallName
from reparax.core.checks import locate_errors
from reparax.core.fields import ByPath, by_path_or_one
from reparax.core.layers import Convention, stacks_of
from reparax.core.origins import Origins
from reparax.core.paths import Names, PyTree, items, path_text, type_of
from reparax.core.raw import Flat, Leaf, flatten
from reparax.core.roles import INPUTS, STACKED, Misfit, Numbers, Role, axes_by_word
from reparax.core.start import follow
from reparax.numerics.arithmetic import is_array

Roles = Mapping[Names, Role]


def visit_with_roles(
    who: object, stages: Sequence[Any], roles: PyTree, visit: Callable[[Any, Flat, Roles], Sequence[Any]]
) -> list[Any]:
    """The stages that ``visit`` returns for each, one or a chain of several, the last one first.

    It gets a stage, the types of the arrays that ``init`` of the stage takes, and their roles.
    """
    roles_of_params = roles_of(who, roles)
    tree = flatten(jax.tree.map(lambda x: type_of(x) if isinstance(x, Role) or is_array(x) else x, roles))
    origins: Origins | None = None
    new_stages, later_stages = list[Any](), list[Any]()
    for stage in reversed(stages):
        tree, origins = follow(later_stages, tree, origins)
        later_stages = list(visit(stage, tree, _inherit_roles(roles_of_params, tree, origins)))
        new_stages[:0] = later_stages
    return new_stages


def _inherit_roles(roles_of_params: Roles, tree: Flat, origins: Origins) -> dict[Names, Role]:
    """The role of each array of ``tree`` that follows a parameter, from those of the parameters."""
    roles = dict[Names, Role]()
    for place, x in tree.arrays.items():
        if is_array(x) and origins[place][0] in roles_of_params:
            source, axes = origins[place]
            roles[place] = roles_of_params[source].of_value(axes, x.shape, x.dtype)
    return roles


def roles_of(who: object, roles: PyTree) -> dict[Names, Role]:
    """The role of each parameter, in a tree of roles or a model of layers; a model's functions have none."""
    leaves = items(roles)
    roles_by_place = {path: role for path, role in leaves if isinstance(role, Role)}
    tree = flatten({} if roles_by_place else roles)
    if conventions := tree.frame.conventions:
        arrays = {path: x for path, x in leaves if is_array(x) and path in conventions}
        return {path: role_by_class(conventions[path], x, tree) for path, x in arrays.items()}
    for path, leaf in leaves:
        if path not in roles_by_place and (is_array(leaf) or not roles_by_place):
            raise TypeError(
                f"{who} takes what `rpx.roles(loss, params, batch)` returns, or a model of nnx or equinox, but got a "
                f"tree with {type(leaf).__name__} at {path_text(path)!r}."
            )
    return roles_by_place


def role_by_class(convention: Convention, x: Any, tree: Flat | None, stacked: Numbers | None = None) -> Role:
    """The role of an array of a layer, or one that says why the layer, and others of ``tree``, do not give it."""
    try:
        role = convention.role(x.shape, x.dtype, stacked)
    except ValueError as error:
        return Role(why=str(error), shape=x.shape, dtype=x.dtype)
    if tree is None:
        return role
    sizes = tuple(x.shape[axis] for axis in stacked or convention.stacks(x.shape)[0])
    why = _why_not_stacked(convention, sizes, tree)
    return Role(why=why, shape=x.shape, dtype=x.dtype) if why else role


def _why_not_stacked(convention: Convention, sizes: Numbers, tree: Flat) -> str:
    """Why stacked axes of these sizes are not those of a stack of layers: another array of its layer has others."""
    for number, sizes_of_one in convention.beside:
        place = tree.frame.places[number]
        shape = getattr(tree.arrays.get(place), "shape", None)  # of an array: a model may hold other objects
        if shape is None:
            continue
        found = [tuple(shape[axis] for axis in stack) for stack in stacks_of(shape, sizes_of_one)]
        if sizes not in found:
            there = found[0] if found else shape[: len(shape) - len(sizes_of_one)]
            return f"{convention.source} has stacked axes of sizes {sizes} there, but {there} at {place[-1]!r}"
    return ""


def with_axes(stage: Any, tree: Flat, roles: Roles) -> list[Any]:
    """The stage with axes as numbers, or several stages, for a tree of types whose arrays have these roles."""
    leaves = tree.leaves(bases=stage._takes_base)

    def stacked_at(leaf: Leaf, _: Any) -> Numbers:
        return find_axes(_stacked_axes(stage, leaf, roles.get(leaf.place)), stage.names_at(leaf))

    chosen = stage._selected("with_axes", leaves, stacked_at=stacked_at)
    axes_of_leaves = list[tuple[Leaf, dict[str, Any]]]()
    for leaf in chosen:
        with locate_errors(CallName(stage, "with_axes", (leaf.path,))):
            axes_of_leaves.append((leaf, axes_at(stage, leaf, roles.get(leaf.place))))
    if parts := _split_by_axes(stage, axes_of_leaves):
        return [numbered for part in parts for numbered in with_axes(part, tree, roles)]
    paths = [leaf.path for leaf in leaves]
    new_stage = _with_numbers(stage, axes_of_leaves, paths, several=False)
    if new_stage._selected("with_axes", leaves) == chosen:
        return [new_stage]
    return [_with_numbers(stage, axes_of_leaves, paths, several=True)]


def _with_numbers(
    stage: Any, axes_of_leaves: Sequence[tuple[Leaf, Mapping[str, Any]]], paths: Sequence[str], *, several: bool
) -> Any:
    """The stage with these axes of leaves, by path where they differ; with ``several``, by path in any case."""
    new_axes = dict[str, Any]()
    for name in dict.fromkeys(name for _, axes in axes_of_leaves for name in axes):
        answers = {leaf.path: axes[name] for leaf, axes in axes_of_leaves if name in axes}
        other_paths = [leaf.path for leaf, axes in axes_of_leaves if name not in axes]
        answers |= {path: getattr(stage.at_path(path), name) for path in other_paths}
        new_axes[name] = by_path_or_one(answers, paths, several=several)
    return replace(stage, **new_axes)


def misfits(stage: Any, tree: Flat, roles: Roles) -> Iterator[Misfit]:
    """Where axes of the stage are not those that it means in that network."""
    for leaf in stage._selected("with_axes", tree.leaves(bases=stage._takes_base)):
        role = roles.get(leaf.place)
        if role is not None and not role.why and not role.ambiguous:
            yield from _misfits_at(stage, leaf, role)


def _misfits_at(stage: Any, leaf: Leaf, role: Role) -> Iterator[Misfit]:
    """The axes of a stage at one array that do not fit the array's role: the stacked ones, or those of other fields."""
    misfit = partial(Misfit, stage=repr(stage), path=leaf.path, role=role)
    stage_here = stage._checked_for("with_axes", leaf)
    stacked = stage_here.stacked_axes
    if set(stacked) != set(role.stacked) and not stage.elementwise:
        yield misfit(field="stacked", got=stacked, expected=role.stacked)
        return
    one_array = one_stacked(leaf.content, stacked)
    numbers = axes_by_word(role, stacked)
    for field, (axes, word) in stage_here.axes_in_use(one_array).items():
        found = tuple(axis - one_array.ndim for axis in axes)
        fits_transposed = stage.transposes and found == numbers[INPUTS]
        if found != numbers[word] and not fits_transposed:
            yield misfit(field=field, got=found, expected=numbers[word])


def _split_by_axes(stage: Any, axes_of_leaves: Iterable[tuple[Leaf, Mapping[str, Any]]]) -> list[Any]:
    """A stage for each set of places in the raw tree, if two values of one array differ in axes; else none.

    Axes by path are those of arrays, and both factors of one, for example, have its path.
    """
    axes_of_path = dict[str, list[Mapping[str, Any]]]()
    leaves_of_part = dict[int, list[Leaf]]()
    for leaf, axes in axes_of_leaves:
        known_axes = axes_of_path.setdefault(leaf.path, [])
        if axes not in known_axes:
            known_axes.append(axes)
        part = known_axes.index(axes)  # the first axes of each path are those of the first stage, and so on
        leaves_of_part.setdefault(part, []).append(leaf)
    return [_stage_at(stage, leaves) for leaves in leaves_of_part.values()] if len(leaves_of_part) > 1 else []


def _stage_at(stage: Any, leaves: Sequence[Leaf]) -> Any:
    """The stage for these places alone."""
    paths = [leaf.path for leaf in leaves]
    fields_by_path = stage._varying_fields.items()
    numbers = {name: value.of(paths) for name, value in fields_by_path if isinstance(value, ByPath)}
    return replace(stage, where="|".join(re.escape(leaf.raw_path) for leaf in leaves), **numbers)


def _fields_in_words(stage: Any) -> dict[str, Any]:
    """The fields of axes that are given in words, or that nobody set, with their words."""
    axes_of_field = {name: getattr(stage, name) for name in stage._axis_fields}
    return unset_fields(stage) | {name: axes for name, axes in axes_of_field.items() if are_words(axes)}


def unset_fields(stage: Any) -> dict[str, Any]:
    """The fields of axes with a meaning in networks that nobody set, with that meaning."""
    if not stage.by_roles:
        return {}
    defaults = {field.name: field.default for field in fields(stage)}
    return {name: word for name, word in stage.by_roles.items() if getattr(stage, name) == defaults[name]}


def _asks_stacked(stage: Any) -> bool:
    """Whether the stacked axes are given in words, or are for the network to say."""
    if are_words(stage.stacked):
        return True
    words = _fields_in_words(stage)
    if stage.stacked != () or (stage.elementwise and not words):
        return False
    # Axes by number, and those that are called stacked, count all axes of the array, as nobody set ``stacked``.
    if any(are_words(axes, (STACKED,)) for axes in words.values()):
        return False
    return all(getattr(stage, name) in (None, EACH, LAST, ()) for name in stage._axis_fields if name not in words)


def _stacked_axes(stage: Any, leaf: Leaf, role: Role | None) -> Any:
    """The stacked axes of an array, as the network says, or the stage."""
    stage = stage.at_path(leaf.path)
    if not leaf.visible or role is None or not _asks_stacked(stage):
        return stage.stacked
    return role.stacked


def axes_at(stage: Any, leaf: Leaf, role: Role | None) -> dict[str, Any]:
    """The axes at one array of each field that asks for them.

    Raises:
      ValueError: If the role does not say them.
    """
    axes_of_field = dict[str, Any]()
    stage = stage.at_path(leaf.path)
    known_role = Role(why="its axes follow none of the network's") if role is None else role
    if _asks_stacked(stage):
        axes_of_field["stacked"] = _one_or_tuple(known_role.stacked)
    if not (words := _fields_in_words(stage)):
        return axes_of_field
    stacked = known_role.stacked if "stacked" in axes_of_field else find_axes(stage.stacked, stage.names_at(leaf))
    if why := _why_unusable(known_role, stacked):
        raise ValueError(f"{why}, or leave it out with `where`.")
    numbers = axes_by_word(known_role, stacked)
    for name, axes in words.items():
        number = _one_or_tuple(words_to_numbers(axes, numbers))
        if isinstance(number, tuple) and stage._checks[name].check.single:
            raise ValueError(
                f"{name} is one axis, but the network has {len(number)} for it, {number} of shape "
                f"{known_role.shape}. Give one by number, or leave the array out with `where`."
            )
        axes_of_field[name] = number
    return axes_of_field


def _why_unusable(role: Role, stacked: Collection[int]) -> str:
    """Why words mean nothing for one of the arrays along these axes, and what to do; empty if they mean something."""
    if role.why:
        return f"no product of it with data is known ({role.why}). Give its axes by number"
    if role.ambiguous:
        return f"the network uses it in several ways ({role.ambiguous}). Give its axes by number"
    if unknown := tuple(axis for axis in role.unknown() if axis not in stacked):
        return f"the network gives no role to axes {unknown} of shape {role.shape}. Give the axes by number"
    return ""


def _one_or_tuple(axes: Sequence[Any]) -> Any:
    """A single axis as a number, several in a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)
