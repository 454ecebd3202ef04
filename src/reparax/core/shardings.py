"""Derives the shardings of raw trees from the partition specs of the model's parameters.

A spec is a JAX ``PartitionSpec``. It has an entry for each axis of an array, and the entry names the mesh axes that
shard this axis. Each axis of a raw value gets the entry of the parameter axis that it *follows*, or corresponds to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from reparax.core.origins import Origins
from reparax.core.paths import Names, PyTree, describe, flatten_with_names, items, path_text, types_of_result
from reparax.core.raw import FIXED, require_no_raw
from reparax.numerics.arithmetic import is_array

AnyMesh = Mesh | AbstractMesh


def shardings_of_raw(
    who: object,
    init: Callable[[PyTree], PyTree],
    follow: Callable[[PyTree], Origins],
    specs: PyTree,
    mesh: AnyMesh,
    like: PyTree,
    memory_kind: str | None,
) -> PyTree:
    """Returns a tree of ``NamedSharding`` with the structure of the raw tree ``init(like)``.

    Args:
      who: The call that errors name.
      init: A function that returns the raw tree of parameters. Only the structure of the raw tree, including flax
        boxes, and the shapes in it are used.
      follow: A function that returns the origins of the raw values: the parameter axis that each of their axes follows.
      specs: The spec of each parameter, or the parameters themselves if they are placed on a mesh. An error is raised
        if a spec does not fit its parameter or the mesh.
      mesh: The mesh of the shardings.
      like: The parameters, or their shapes and dtypes; None if ``specs`` are the parameters themselves.
      memory_kind: The JAX memory kind for fixed values, such as ``"pinned_host"``, or None for the default.
    """
    params = specs if like is None else like
    require_no_raw(who, params, "Pass `like=params`, the parameters or their shapes and dtypes.")
    arrays = {path_text(path): x for path, x in items(params) if is_array(x)}
    entries_of_params = {
        path: _checked_entries(f"{who} at {path!r}", x, arrays[path], mesh)
        for path, x in _specs_by_path(who, specs, arrays).items()
    }
    origins = follow(params)
    paths, leaves, treedef = flatten_with_names(types_of_result(init, params))

    def sharding_of(path: Names, x: Any) -> NamedSharding:
        """Returns the sharding of the raw value ``x`` at the key path ``path``.

        An axis of ``x`` is sharded like the parameter axis that it follows if its length splits evenly. Otherwise, or
        if it follows no parameter axis, it is replicated.
        """
        source, axes = origins[path]
        entries = [None if axis is None else entries_of_params[path_text(source)][axis] for axis in axes]
        pairs = zip(entries, x.shape, strict=True)
        even_entries = [None if n % _count_parts(entry, mesh) else entry for entry, n in pairs]
        return NamedSharding(mesh, PartitionSpec(*even_entries), memory_kind=memory_kind if FIXED in path else None)

    return treedef.unflatten(map(sharding_of, paths, leaves))


def _specs_by_path(who: object, specs: PyTree, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict from path to the leaf of ``specs`` there: a ``PartitionSpec`` or an array placed on a mesh.

    Raises:
      ValueError: If ``arrays`` and ``specs`` have different paths, or if ``arrays`` is empty, so shapes are unknown.
    """
    spec_of = {path_text(path): x for path, x in items(specs) if is_array(x) or _spec_of(x) is not None}
    if spec_of and not arrays:
        raise ValueError(
            f"{who} got only specs, which have no shapes. Pass like=params, the parameters or their shapes and dtypes."
        )
    if "" in spec_of and "" not in arrays:  # A tree that is a single leaf has the empty path.
        raise ValueError(
            f"{who} got a single spec for a tree of {len(arrays)} arrays. Give one PartitionSpec for each array, as by "
            f"jax.tree.map(lambda w: PartitionSpec(), params)."
        )
    for path in sorted(arrays.keys() ^ spec_of.keys()):  # The error names the first path that only one of them has.
        with_path, without_path = ("parameters", "specs") if path in arrays else ("specs", "parameters")
        raise ValueError(
            f"{who}: the {with_path} hold {path!r}, but the {without_path} do not. Give one PartitionSpec for each "
            f"array; PartitionSpec() replicates an array on all devices."
        )
    return spec_of


def _spec_of(x: Any) -> PartitionSpec | None:
    """Returns the ``PartitionSpec`` of a spec, a sharding or an array on a mesh; None for any other object."""
    if isinstance(x, PartitionSpec):
        return x
    sharding = getattr(x, "sharding", x)  # A sharding itself has no attribute `sharding`, so use `x`.
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _checked_entries(who: object, leaf: Any, x: Any, mesh: AnyMesh) -> tuple[Any, ...]:
    """Returns a spec's entry for each axis of the parameter ``x``: ``("data", None)`` for ``P("data")`` of a matrix.

    ``leaf`` is the ``PartitionSpec``, or an array placed on a mesh.

    Raises:
      ValueError: If ``leaf`` has no spec, or if the spec does not fit ``x`` or the mesh.
    """
    spec = _spec_of(leaf)
    if spec is None:
        raise ValueError(
            f"{who}: expected a PartitionSpec or an array placed on a mesh, got {describe(leaf)} without a mesh. "
            f"Pass a tree of specs, and the parameters as `like`."
        )
    if len(spec) > x.ndim:
        raise ValueError(
            f"{who}: {spec} has {len(spec)} entries, but {describe(x)} has {x.ndim} axes. Give at most one entry for "
            f"each axis."
        )
    _require_mesh_axes(who, spec, mesh)
    for axis, entry in enumerate(spec):
        if x.shape[axis] % _count_parts(entry, mesh):
            raise ValueError(
                f"{who}: {spec} cannot split axis {axis} of {describe(x)} into {_count_parts(entry, mesh)} equal "
                f"parts. Use None as the entry for this axis, or mesh axes whose sizes divide {x.shape[axis]}."
            )
    return (*spec, *(None,) * (x.ndim - len(spec)))


def _require_mesh_axes(who: object, spec: PartitionSpec, mesh: AnyMesh) -> None:
    """Raises a ValueError unless a spec names only axes of the mesh, and names each of them at most once."""
    mesh_axes = [name for entry in spec for name in _mesh_axes(entry)]
    for name in mesh_axes:
        if name not in mesh.shape:
            raise ValueError(
                f"{who}: {spec} names {name!r}, but the mesh has the axes {mesh.axis_names}. Use their names."
            )
        if mesh_axes.count(name) > 1:
            raise ValueError(f"{who}: {spec} names {name!r} twice, but a mesh axis can shard only one axis. Drop one.")


def _mesh_axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a ``PartitionSpec`` (a tuple of names, one name, or None) as a tuple."""
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def _count_parts(entry: Any, mesh: AnyMesh) -> int:
    """Returns the number of parts into which an entry of a ``PartitionSpec`` splits an axis of an array.

    On a mesh of 4 by 2 devices with the axes ``x`` and ``y``, the entry ``("x", "y")`` splits an axis into 8 parts.
    """
    return math.prod(mesh.shape[name] for name in _mesh_axes(entry))
