"""Finds the axes of a stage at one array: those that the user gave, and for unset fields, those of the array's role.

The role of an array says which of its axes are inputs, outputs or stacked. In :meth:`Parametrization.with_axes`, roles
come from the program of the network, as analyzed by ``rpx.roles``. Everywhere else, they come from the layer that holds
the array, or from the array's name (``core/known_axes.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from reparax.core.axes import EACH, LAST, find_axes, one_stacked, stacked_axes_error
from reparax.core.calls import CallName
from reparax.core.checks import locate_errors
from reparax.core.fields import ByPath, join_by_path
from reparax.core.initialization import follow_axes
from reparax.core.known_axes import KnownAxes, role_by_letters
from reparax.core.origins import Origins
from reparax.core.paths import Names, PyTree, items, path_text, type_of
from reparax.core.raw import Flat, Leaf, flatten
from reparax.core.roles import INPUTS, Misfit, Numbers, Role, axes_by_word, one_or_tuple
from reparax.numerics.arithmetic import is_array

Roles = Mapping[Names, Role]

_MEANINGS = {
    2: (("io", "(in, out)"), ("oi", "(out, in), as in torch and equinox")),
    3: (
        ("wio", "(width, in, out) of a convolution or (heads, dim, out) of attention"),
        ("woi", "(width, out, in) of a transposed convolution"),
        ("ioo", "(in, heads, dim) of attention"),
        ("oiw", "(out, in, width), as in torch and equinox"),
        ("sio", "a stack of (in, out)"),
    ),
    4: (
        ("wwio", "(height, width, in, out) of a convolution"),
        ("wwoi", "(height, width, out, in) of a transposed convolution"),
        ("oiww", "(out, in, height, width), as in torch and equinox"),
        ("sioo", "a stack of (in, heads, dim)"),
        ("siio", "a stack of (heads, dim, out)"),
        ("ssio", "stacks of (in, out)"),
    ),
}
"""Possible meanings of 2, 3 or 4 axes: a letter for each axis (see ``core/known_axes.py``), and the text in errors."""

_OR_ROLES = (
    "let reparax find them in your loss, `p = p.with_axes(rpx.roles(loss, params, batch))`, or leave the array out "
    "with `where`."
)


def axes_at(stage: Any, leaf: Leaf, w: Any, stacked: Numbers = ()) -> dict[str, Any]:
    """Returns the axes for fields of a stage that take them from an array's role: ``{"axis": -1, "stacked": 0}``.

    If the user gave all axes, or the stage needs no axes at this array, the result is empty.

    Args:
      stage: The stage, in which axes that depend on the array's path are already resolved.
      leaf: A description of the array: its path, its layer or name, and its role if a network was analyzed.
      w: The array, or its shape and dtype.
      stacked: The stacked axes of ``w`` if ``w`` is only a candidate for the array's type, from ``candidate_types``.

    Raises:
      ValueError: If a field needs an axis that the array's role does not give.
    """
    if leaf.network_role is not None:
        return _axes_by_role(stage, leaf, leaf.network_role)
    if not stage.lacks_axes:
        return {}
    given, known = find_axes(stage.stacked, leaf), leaf.axes
    n_unstacked = w.ndim - len(given)
    is_matrix = n_unstacked == 2 and stage.any_matrix and not known.is_class
    if n_unstacked < 2 or stacked_axes_error(w, given) or is_matrix:
        return {}  # A vector, or a matrix under `any_matrix`, needs no axes. Wrong stacked axes are reported elsewhere.
    if stage.outside_networks and not known.is_class:
        why = f"its name does not show whether it is a weight of a network or holds {stage.outside_networks}"
        known = KnownAxes(why=why)
    role = known.role_of(w, stacked or given, None if stacked else leaf.tree)
    if role.why:
        raise ValueError(_unknown_axes(stage, leaf, w, given, role.why))
    return _axes_by_role(stage, leaf, role)


def stacked_at(stage: Any, leaf: Leaf, w: Any) -> Numbers:
    """Returns the stacked axes of ``w``, an array or its type. The default of ``where`` ignores these axes of an array.

    The stacked axes come from the network's roles, from the user, or from the layer: a ``Linear`` kernel of shape
    ``(3, 8, 4)`` has the stacked axis 0. If several choices fit the layer, the first is returned, because callers use
    only the number of axes. If no choice fits the layer, the result has as many axes as the array has beyond those of
    the layer, and another check reports the error.
    """
    if leaf.network_role is not None and stage.takes_stacked_from_role:
        return leaf.network_role.stacked
    given = find_axes(stage.stacked, leaf)
    # The layer determines the stacked axes only if neither the user nor a network does, and the stage needs axes.
    if given or leaf.network_role is not None or not stage.lacks_axes or not leaf.axes.are_of_layer:
        return given
    stacks = leaf.axes.possible_stacks(w.shape)
    return stacks[0] if stacks else tuple(range(w.ndim - len(leaf.axes.sizes)))


def _axes_by_role(stage: Any, leaf: Leaf, role: Role) -> dict[str, Any]:
    """Returns the axes for fields of a stage that take them from an array's ``role``: ``{"axis": -1, "stacked": 0}``.

    For a kernel of shape ``(in, out)``, a field for ``"outputs"`` gets -1, and a field for ``"inputs"`` gets -2. These
    indices are negative and skip the stacked axes. The indices in ``stacked`` are nonnegative and count all axes.

    Raises:
      ValueError: If the role does not determine the axes, or gives several axes for a field that takes one.
    """
    axes_of_field = {"stacked": one_or_tuple(role.stacked)} if stage.takes_stacked_from_role else {}
    if not stage.axes_from_role:
        return axes_of_field
    stacked = role.stacked if stage.takes_stacked_from_role else find_axes(stage.stacked, leaf)
    if why := _why_unusable(role, stacked):
        raise ValueError(f"{why}. Give its axes as integers, or leave the array out with `where`.")
    numbers = axes_by_word(role, stacked)
    for name, axes in stage.axes_from_role.items():
        given = axes if isinstance(axes, tuple) else (axes,)
        # A word such as "inputs" may stand for several axes. Any other axis is already an integer.
        found = one_or_tuple([number for axis in given for number in numbers.get(axis, (axis,))])
        if isinstance(found, tuple) and stage._checks[name].check.single:
            raise ValueError(
                f"{name} must be one axis, but the network has {len(found)} such axes, {found}, in the array of shape "
                f"{role.shape}. Give one of them as an integer, or leave the array out with `where`."
            )
        axes_of_field[name] = found
    return axes_of_field


def _why_unusable(role: Role, stacked: Collection[int]) -> str:
    """Returns the beginning of an error text if words such as ``"outputs"`` have no meaning for this role, or else "".

    The words have no meaning if an axis has no role or several roles. Axes in ``stacked`` need no role.
    """
    if role.why:
        return f"no product of the array with data is known ({role.why})"
    if role.ambiguous:
        return f"the network uses the array in several ways ({role.ambiguous})"
    if unknown := tuple(axis for axis in role.unknown() if axis not in stacked):
        return f"no product shows whether axes {unknown} of the array of shape {role.shape} are inputs or outputs"
    return ""


def _unknown_axes(stage: Any, leaf: Leaf, w: Any, stacked: Numbers, why: str) -> str:
    """Returns the error text for an array whose axis roles are unknown, with the code to write for each possibility.

    ``stacked`` holds the stacked axes that the user gave, and ``why`` says why the roles are unknown. For an array of
    shape ``(3, 4)``, the text offers ``WeightNorm(axis=-1)`` for ``(in, out)`` and ``WeightNorm(axis=-2)`` for
    ``(out, in)``. If only the stacked axes are unknown, the text offers the choices of stacked axes that fit the layer.
    """
    shape, stacks = tuple(w.shape), [] if stacked else leaf.axes.possible_stacks(w.shape)
    if leaf.axes.are_of_layer and len(stacks) > 1:
        codes = " or ".join(repr(replace(stage, stacked=stack)) for stack in stacks)
        return f"cannot determine the stacked axes of an array of shape {shape}: {why}. Write {codes}. Or {_OR_ROLES}"
    n_unstacked = w.ndim - len(stacked)
    inputs = "i" * (n_unstacked - 1)
    any_ndim = ((f"{inputs}o", "(..., in, out)"), (f"o{inputs}", "(out, in, ...)"))  # for arrays of five axes or more
    meanings_of_code = dict[str, list[str]]()
    if stage.outside_networks:
        along_last = dict.fromkeys(stage.unset_axes, -1)
        meanings_of_code[repr(replace(stage, **along_last))] = [stage.outside_networks]
    for letters, meaning in _MEANINGS.get(n_unstacked, any_ndim):
        if stacked and "s" in letters:
            continue  # The user already gave the stacked axes, so the other axes cannot be stacked.
        role = KnownAxes(role_by_letters(letters, (None,) * n_unstacked)).role_of(w, stacked)
        with suppress(ValueError, TypeError):  # If the stage does not accept such axes, offer nothing for them.
            code = repr(replace(stage, **_axes_by_role(stage, leaf, role)))
            meanings_of_code.setdefault(code, []).append(meaning)
    writings = [f"{code} for {' or '.join(meanings)}" for code, meanings in meanings_of_code.items()]
    return (
        f"cannot determine which axes of an array of shape {shape} are inputs and which are outputs: {why}. Write "
        f"{'; or '.join(writings)}. Or {_OR_ROLES}"
    )


def axes_in_words(stage: Any, bound: Any, known: KnownAxes) -> str:
    """Returns the axes of a stage at an array, and where they come from, as table text: ``"axis=-1 (nnx.Linear)"``.

    ``bound`` is the stage with the axes for that array, and ``known`` holds the axis roles derived from the array's
    layer or name. The text in parentheses is ``given`` if the user set the axes, that layer or name if the axes are
    derived from it, and ``a matrix`` if the stage accepts any matrix. If the stage does not depend on axes, the result
    is empty.
    """
    if not isinstance(getattr(stage, "by_roles", None), Mapping) or not stage.needs_axes:
        return ""  # A stage that does not treat each array on its own, such as `Tie`, has no `by_roles`.
    axes = {name: getattr(bound, name) for name in stage._axis_fields}
    used = {name: x for name, x in axes.items() if x not in (None, (), EACH, LAST)}
    if not used and not stage.any_matrix:
        return ""
    shown = used or {"rows": 0, "columns": 1}
    if bound.stacked != ():
        shown = shown | {"stacked": bound.stacked}
    if not stage.by_roles or stage.by_roles.keys() - stage.unset_axes.keys():
        source = "given"
    elif stage.unset_axes.keys() & used.keys():
        source = known.source if known.is_class else repr(known.source)
    else:
        source = "a matrix"
    return f"{', '.join(f'{name}={x}' for name, x in shown.items())} ({source})"


# The functions below are for chains of stages on a network that was analyzed, so that each parameter's role is known.


def visit_with_roles(
    who: object, stages: Sequence[Any], roles: PyTree, visit: Callable[[Any, Flat], Sequence[Any]]
) -> list[Any]:
    """Calls ``visit`` on each stage, starting with the last, and returns the stages of the new chain in order.

    ``init`` of a chain runs the last stage first, and passes its raw values to the stage before it. Here, only the
    types of these values are computed. Each value inherits its role from the parameter to which its axes correspond.

    Args:
      who: The call to name in errors.
      stages: The stages of a chain.
      roles: A tree of :class:`Role` objects, or a model of nnx or equinox layers.
      visit: A function of a stage and of the tree of array types, with roles, that ``init`` of the stage receives. It
        returns a list of one or more stages that replace the stage.
    """
    roles_of_params = roles_of(who, roles)
    tree = flatten(jax.tree.map(lambda x: type_of(x) if isinstance(x, Role) or is_array(x) else x, roles))
    origins: Origins | None = None
    new_stages, later_stages = list[Any](), list[Any]()
    for stage in reversed(stages):
        tree, origins = follow_axes(later_stages, tree, origins)
        later_stages = list(visit(stage, replace(tree, roles=_inherit_roles(roles_of_params, tree, origins))))
        new_stages[:0] = later_stages  # The stages are visited backwards, so each result goes in front.
    return new_stages


def _inherit_roles(roles_of_params: Roles, tree: Flat, origins: Origins) -> Roles:
    """Derives the role of each array of a raw tree from the role of its parameter, if the parameter has a role.

    ``origins`` maps the axes of each raw value to parameter axes. If the norms ``g`` of a kernel ``(in, out)`` have the
    shape ``(1, out)``, for example, axis 1 of the norms is an output.
    """
    sources = {place: origins[place] for place, x in tree.arrays.items() if is_array(x)}
    return {
        place: roles_of_params[source].follow(axes, tree.arrays[place].shape, tree.arrays[place].dtype)
        for place, (source, axes) in sources.items()
        if source in roles_of_params
    }


def roles_of(who: object, roles: PyTree) -> Roles:
    """Maps the key path of each parameter to its :class:`Role`, given a tree of roles, or an nnx or equinox model.

    Leaves of a model that are not arrays, such as functions, have no role. A tree of roles may contain such leaves too.

    Raises:
      TypeError: If ``roles`` is anything else, such as a plain tree of parameters.
    """
    leaves = items(roles)
    roles_by_place = {path: role for path, role in leaves if isinstance(role, Role)}
    tree = flatten({} if roles_by_place else roles)
    if by_class := {place: axes for place, axes in tree.frame.axes.items() if axes.is_class}:
        return {path: by_class[path].role_of(x, tree=tree) for path, x in leaves if is_array(x) and path in by_class}
    for path, leaf in leaves:
        if path not in roles_by_place and (is_array(leaf) or not roles_by_place):
            raise TypeError(
                f"{who} takes the result of `rpx.roles(loss, params, batch)`, or a model of nnx or equinox, but got a "
                f"tree with {type(leaf).__name__} at {path_text(path)!r}. Pass that result."
            )
    return roles_by_place


def with_axes(stage: Any, tree: Flat) -> list[Any]:
    """Returns the stage with all its axes as integers; ``tree`` holds the types and the roles of the arrays.

    ``WeightNorm()`` becomes ``WeightNorm(axis=-1)`` if the output axis of each kernel is the last one. Otherwise,
    ``axis`` becomes a dict from path patterns to axes. If two raw values of one parameter need different axes, the list
    has several stages, because both values have the parameter's path.
    """
    axes_of_leaves = list[tuple[Leaf, dict[str, Any]]]()
    for leaf in stage._selected("with_axes", tree.leaves(bases=stage._takes_base)):
        with locate_errors(CallName(stage, "with_axes", (leaf.path,))):
            axes = axes_at(stage._with_placeholders.for_array(leaf.path, None), leaf, leaf.content)
            axes_of_leaves.append((leaf, axes))
    if copies := _split_by_axes(stage, axes_of_leaves):  # Each copy selects fewer arrays, so the recursion ends.
        return [numbered for copy in copies for numbered in with_axes(copy, tree)]
    leaves = replace(tree, roles=None).leaves(bases=stage._takes_base)
    paths = [leaf.path for leaf in leaves]
    new_stage = _with_numbers(stage, axes_of_leaves, paths, several=False)
    # Later calls, such as `init`, select arrays without roles. If they would select other arrays than here, give the
    # axes by path, because a stage with axes by path acts only on arrays whose path has an entry.
    if [leaf.place for leaf in new_stage._selected("with_axes", leaves)] == [leaf.place for leaf, _ in axes_of_leaves]:
        return [new_stage]
    return [_with_numbers(stage, axes_of_leaves, paths, several=True)]


def _with_numbers(
    stage: Any, axes_of_leaves: Sequence[tuple[Leaf, Mapping[str, Any]]], paths: Sequence[str], *, several: bool
) -> Any:
    """Returns the stage with the axes of each leaf in its fields: plain axes if all leaves agree, or a dict by path.

    With ``several``, the axes are always given by path, so that the stage acts only on these leaves. ``paths`` are the
    paths of all arrays of the tree. A field without new axes for a leaf keeps the axes that ``stage`` has there.
    """
    new_axes = dict[str, Any]()
    for name in dict.fromkeys(name for _, axes in axes_of_leaves for name in axes):
        axes_of_path = {leaf.path: axes[name] for leaf, axes in axes_of_leaves if name in axes}
        others = [leaf.path for leaf, axes in axes_of_leaves if name not in axes]
        axes_of_path |= {path: getattr(stage._with_placeholders.for_array(path, None), name) for path in others}
        new_axes[name] = join_by_path(axes_of_path, paths, several=several)
    return replace(stage, **new_axes)


def misfits(stage: Any, tree: Flat) -> Iterator[Misfit]:
    """Yields a :class:`Misfit` for each field of the stage whose axes contradict the role of an array in ``tree``.

    The stage selects the same arrays as in ``init``, that is, without their roles. If the role of an array is unknown
    or ambiguous, no misfit is reported for that array.
    """
    for leaf in stage._selected("with_axes", replace(tree, roles=None).leaves(bases=stage._takes_base)):
        role = (tree.roles or {}).get(leaf.place)
        if role is not None and not role.why and not role.ambiguous:
            yield from _misfits_at(stage, leaf, role)


def _misfits_at(stage: Any, leaf: Leaf, role: Role) -> Iterator[Misfit]:
    """Yields a :class:`Misfit` for each field whose axes contradict the array's role, or only one if ``stacked`` does.

    Axes in all other fields skip the stacked axes, so they cannot be compared if the stacked axes are wrong.
    """
    misfit = partial(Misfit, stage=repr(stage), path=leaf.path, role=role)
    stage_here = stage._checked_for("with_axes", leaf)
    stacked = stage_here.stacked_axes
    if set(stacked) != set(role.stacked) and not stage.elementwise:
        yield misfit(field="stacked", got=stacked, expected=role.stacked)
        return
    one_array, numbers = one_stacked(leaf.content, stacked), axes_by_word(role, stacked)
    for field, (axes, word) in stage_here.axes_in_use(one_array).items():
        found = tuple(axis - one_array.ndim for axis in axes)
        fits_transposed = stage.transposes and found == numbers[INPUTS]  # `w` and `w.T` are equivalent.
        if found != numbers[word] and not fits_transposed:
            yield misfit(field=field, got=found, expected=numbers[word])


def _split_by_axes(stage: Any, axes_of_leaves: Iterable[tuple[Leaf, Mapping[str, Any]]]) -> list[Any]:
    """Returns copies of the stage that divide its arrays, if two raw values with the same path need different axes.

    The factors ``a`` and ``b`` of a low-rank kernel, for example, both have the path of the kernel, so axes by path
    would be the same for both. The result then has one stage for all ``a``, and another for all ``b``. If no two values
    with the same path need different axes, the result is empty.
    """
    different_axes = dict[str, list[Mapping[str, Any]]]()  # Maps each path to a list of distinct axes.
    leaves_of_copy = dict[int, list[Leaf]]()
    for leaf, axes in axes_of_leaves:
        axes_at_path = different_axes.setdefault(leaf.path, [])
        if axes not in axes_at_path:
            axes_at_path.append(axes)
        number = axes_at_path.index(axes)  # Copy n uses the n-th distinct setting of the axes at each path.
        leaves_of_copy.setdefault(number, []).append(leaf)
    return [_stage_at(stage, leaves) for leaves in leaves_of_copy.values()] if len(leaves_of_copy) > 1 else []


def _stage_at(stage: Any, leaves: Sequence[Leaf]) -> Any:
    """Returns a copy of the stage that selects only these leaves, by their paths in the raw tree.

    A field given by path keeps only the patterns that match these leaves, because a pattern without a match is an
    error.
    """
    paths = [leaf.path for leaf in leaves]
    fields_by_path = stage._varying_fields.items()
    numbers = {name: value.for_paths(paths) for name, value in fields_by_path if isinstance(value, ByPath)}
    return replace(stage, where="|".join(re.escape(leaf.raw_path) for leaf in leaves), **numbers)
