"""Where the arrays of a raw tree, and of an optimizer's state, lie on a mesh."""

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from reparax._axes.origin import Follow, Init, inherit
from reparax._tree.differences import abstract
from reparax._tree.paths import Names, PyTree, describe, is_array, items, named, path_text

AnyMesh = Mesh | AbstractMesh


def shardings_of_raw(who: str, init: Init, follow: Follow, specs: PyTree, mesh: AnyMesh, like: PyTree) -> PyTree:
    """The shardings of ``init(like)``: each axis is cut as the axis of its parameter is that it follows.

    ``follow`` tells which, and ``init`` puts boxes around the shardings.
    """
    params = specs if like is None else like
    arrays = {path_text(path): x for path, x in items(params) if is_array(x)}
    cuts = {path: _cuts(f"{who} at {path!r}", x, arrays[path], mesh) for path, x in _found(who, specs, arrays).items()}
    taken = inherit(follow, params, cuts)
    paths, leaves, treedef = named(abstract(init, params))
    return treedef.unflatten(
        [NamedSharding(mesh, _fitting(taken[path], x.shape, mesh)) for path, x in zip(paths, leaves, strict=True)]
    )


def state_shardings(state: PyTree, raw: PyTree, shardings: PyTree) -> PyTree:
    """The shardings of an optimizer's state, or of a whole training state: of each array, those of its raw array.

    An array of the state belongs to the raw array whose path its own path ends in, if it is of the same shape: moments,
    averages and accumulated gradients. All others, such as counters, lie whole on every device.

    Args:
      state: The state, or its shapes and dtypes: ``jax.eval_shape(tx.init, raw)``.
      raw: The raw tree, or its shapes and dtypes.
      shardings: What :meth:`Parametrization.shardings` gives for it.

    Raises:
      ValueError: Naming a raw array without a sharding.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> from jax.sharding import AbstractMesh, PartitionSpec
      >>> mesh = AbstractMesh((2, 4), ("data", "model"))
      >>> params, p = {"w": jnp.ones((8, 16))}, rpx.WeightNorm()
      >>> shardings = p.shardings({"w": PartitionSpec("data", "model")}, mesh, like=params)
      >>> raw = jax.eval_shape(p.init, params)
      >>> state = rpx.state_shardings(jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, raw), raw, shardings)
      >>> state[0].trace["w"]["@weight_norm"]["g"].spec
      P(None, 'model')
    """
    shapes = {path: x.shape for path, x in items(raw) if is_array(x)}
    known = {path: x for path, x in items(shardings) if isinstance(x, NamedSharding)}
    if lacking := sorted(shapes.keys() - known.keys()):
        raise ValueError(
            f"state_shardings: the raw tree holds {path_text(lacking[0])!r}, for which there is no sharding. Pass the "
            f"raw tree, and what `p.shardings` gives for it."
        )
    whole = NamedSharding(next(iter(known.values())).mesh, PartitionSpec())

    def of(path: Names, x: Any) -> NamedSharding | None:
        ends = (path[i:] for i in range(len(path) + 1))
        own = next((end for end in ends if end in shapes), None)
        return None if not is_array(x) else known[own] if own is not None and shapes[own] == x.shape else whole

    paths, leaves, treedef = named(state)
    return treedef.unflatten([of(path, x) for path, x in zip(paths, leaves, strict=True)])


def _found(who: str, specs: PyTree, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What ``specs`` holds for each array, by its path."""
    found = {path_text(path): x for path, x in items(specs) if is_array(x) or _spec(x) is not None}
    if found and not arrays:
        raise ValueError(
            f"{who} got specs alone, which tell no shapes. Pass like=params, the parameters or their shapes and dtypes."
        )
    for path in sorted(arrays.keys() ^ found.keys()):
        holder, other = ("parameters", "specs") if path in arrays else ("specs", "parameters")
        raise ValueError(
            f"{who}: the {holder} hold {path!r}, the {other} do not. Give one PartitionSpec for each array; "
            f"PartitionSpec() keeps it whole on every device."
        )
    return found


def _spec(x: Any) -> PartitionSpec | None:
    """The spec that ``x`` is or carries."""
    sharding = getattr(x, "sharding", x)
    return sharding.spec if isinstance(sharding, NamedSharding) else x if isinstance(x, PartitionSpec) else None


def _cuts(who: str, given: Any, x: Any, mesh: AnyMesh) -> tuple[Any, ...]:
    """The entry of a spec for each axis of ``x``, once it is known to fit."""
    spec = _spec(given)
    if spec is None:
        raise ValueError(
            f"{who}: expected a PartitionSpec or an array that lies on a mesh, got {describe(given)} on none. "
            f"Give the specs, and the parameters as `like`."
        )
    if len(spec) > x.ndim:
        raise ValueError(f"{who}: {spec} has {len(spec)} entries, but {describe(x)} has {x.ndim} axes. Shorten it.")
    used = [name for entry in spec for name in _mesh_axes(entry)]
    for name in used:
        if name not in mesh.shape:
            raise ValueError(
                f"{who}: {spec} names {name!r}, but the mesh has the axes {mesh.axis_names}. Name one of these."
            )
        if used.count(name) > 1:
            raise ValueError(f"{who}: {spec} names {name!r} twice. An axis of the mesh cuts one axis of an array.")
    for axis, entry in enumerate(spec):
        if x.shape[axis] % _parts(entry, mesh):
            raise ValueError(
                f"{who}: {spec} cuts axis {axis} of {describe(x)} into {_parts(entry, mesh)} parts, which are not of "
                f"one size. Leave that axis whole."
            )
    return (*spec, *(None,) * (x.ndim - len(spec)))


def _mesh_axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


def _parts(entry: Any, mesh: AnyMesh) -> int:
    return math.prod(mesh.shape[name] for name in _mesh_axes(entry))


def _fitting(cuts: tuple[Any, ...], shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    """The spec of a raw array, which leaves those axes whole that cannot be cut evenly."""
    return PartitionSpec(*(None if n % _parts(cut, mesh) else cut for cut, n in zip(cuts, shape, strict=True)))
