"""The axes of a stage that nobody set: those of the convention that the array's layer or name has, or an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp

from reparax.core.axes import EACH, LAST, find_axes, stacked_axes_error
from reparax.core.axes_by_roles import axes_at, role_by_class, unset_fields
from reparax.core.layers import Convention
from reparax.core.raw import Leaf
from reparax.core.roles import Numbers

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
"""What arrays may be, by their numbers of axes."""

_OR_ROLES = (
    "let your loss say it, `p = p.with_axes(rpx.roles(loss, params, batch))`, or leave the array out with `where`."
)


def lacks_axes(stage: Any) -> bool:
    """Whether a stage has axes that nobody set, without which it cannot act on an array."""
    return stage.needs_axes and bool(unset_fields(stage))


def stack_by_convention(stage: Any, leaf: Leaf, w: Any) -> Numbers:
    """The stacked axes of an array that its layer says, or how many, for a stage whose axes nobody set."""
    if not leaf.convention.is_of_layer or not lacks_axes(stage):
        return ()
    stacks = leaf.convention.stacks(w.shape)
    return stacks[0] if stacks else tuple(range(w.ndim - len(leaf.convention.axes)))


def with_axes_by_convention(stage: Any, leaf: Leaf, w: Any, *, stacked: Numbers | None = None) -> Any:
    """The stage at an array like ``w``, with the axes that nobody set as the array's layer or name says them.

    ``stacked`` are the stacked axes of a type that stands for the array, by :func:`types_to_try`.

    Raises:
      ValueError: If neither says them.
    """
    if not lacks_axes(stage):
        return stage
    convention = leaf.convention
    given = find_axes(stage.stacked, stage.names_at(leaf))
    n_unstacked = w.ndim - len(given)
    is_matrix = n_unstacked == 2 and stage.any_matrix and not convention.is_class
    if n_unstacked < 2 or stacked_axes_error(w, given) or is_matrix:
        return stage  # a vector has one axis, a matrix is one in either order, and ``stacked`` may be wrong
    if stage.outside_networks and not convention.is_class:
        why = f"a name does not say whether a network contracts it or it holds {stage.outside_networks}"
        convention = Convention(why=why)
    role = role_by_class(convention, w, None if stacked else leaf.tree, stacked or given)
    if role.why:
        raise ValueError(_unknown_axes(stage, leaf, w, given, role.why))
    axes_of_field = axes_at(stage, leaf, role)
    is_same = all(axes == getattr(stage, name) for name, axes in axes_of_field.items())
    return stage if is_same else replace(stage, **axes_of_field)


def types_to_try(stage: Any, leaf: Leaf) -> list[tuple[Any, Numbers]]:
    """Types that an array may have, whose values alone are known, each with its stacked axes: at most three."""
    if not lacks_axes(stage):
        return [(None, ())]
    convention = leaf.convention
    given = find_axes(stage.stacked, stage.names_at(leaf))
    sizes = [2 if size is None else size for size in convention.sizes] or [2, 2]
    counts = range(4) if convention.is_of_layer and not given else ()
    stacks = [stack for count in counts for stack in combinations(range(len(sizes) + count), count)] or [given]
    return [(_type_with(sizes, stack), stack) for stack in stacks]


def _type_with(sizes: Sequence[int], stacked: Numbers) -> Any:
    """The type of an array of these sizes along the axes that are not stacked."""
    shape = list(sizes)
    for axis in sorted(stacked):
        shape.insert(axis, 2)
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


def axes_in_words(stage: Any, bound: Any, convention: Convention) -> str:
    """The axes of a stage where it is bound to an array, and where it knows them from; empty if it has none."""
    if not isinstance(getattr(stage, "by_roles", None), Mapping) or not stage.needs_axes:
        return ""
    axes = {name: getattr(bound, name) for name in stage._axis_fields}
    used = {name: x for name, x in axes.items() if x not in (None, (), EACH, LAST)}
    if not used and not stage.any_matrix:
        return ""
    shown = used or {"rows": 0, "columns": 1}
    if bound.stacked != ():
        shown = shown | {"stacked": bound.stacked}
    return f"{', '.join(f'{name}={x}' for name, x in shown.items())} ({_source_of_axes(stage, used, convention)})"


def _source_of_axes(stage: Any, used: Mapping[str, Any], convention: Convention) -> str:
    """Where a stage has the axes from that it uses: they are given, or of a convention, or those of any matrix."""
    unset = unset_fields(stage)
    if not stage.by_roles or stage.by_roles.keys() - unset.keys():
        return "given"
    if unset.keys() & used.keys():
        return convention.source if convention.is_class else repr(convention.source)
    return "a matrix"


def _unknown_axes(stage: Any, leaf: Leaf, w: Any, stacked: Numbers, why: str) -> str:
    """The error for an array of whose axes nothing is known: what it may be, and what to write."""
    unstacked = [axis for axis in range(w.ndim) if axis not in stacked]
    stacks = [] if stacked else leaf.convention.stacks(w.shape)
    if leaf.convention.is_of_layer and len(stacks) > 1:
        codes = " or ".join(repr(replace(stage, stacked=stack)) for stack in stacks)
        return f"the axes of shape {tuple(w.shape)} are not known: {why}. Write {codes}. Or {_OR_ROLES}"
    inputs = "i" * (len(unstacked) - 1)
    any_ndim = ((f"{inputs}o", "(..., in, out)"), (f"o{inputs}", "(out, in, ...)"))
    meanings_of_code = dict[str, list[str]]()
    if stage.outside_networks:
        along_last = dict.fromkeys(unset_fields(stage), -1)
        meanings_of_code[repr(replace(stage, **along_last))] = [stage.outside_networks]
    for letters, meaning in _MEANINGS.get(len(unstacked), any_ndim):
        if stacked and "s" in letters:
            continue
        with suppress(ValueError, TypeError):
            role = Convention(letters).role_of_axes(unstacked, stacked, w.shape, w.dtype)
            code = repr(replace(stage, **axes_at(stage, leaf, role)))
            meanings_of_code.setdefault(code, []).append(meaning)
    writings = [f"{code} for {' or '.join(meanings)}" for code, meanings in meanings_of_code.items()]
    return f"the axes of shape {tuple(w.shape)} are not known: {why}. Write {'; or '.join(writings)}. Or {_OR_ROLES}"
