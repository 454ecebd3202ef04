"""One parameter in several places."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax import _raw
from reparax._core import call
from reparax._manifest import code
from reparax._paths import PyTree, described, is_array
from reparax._raw import Slot
from reparax._stage import Stage

Transform = Callable[[Array], Array]
Tied = tuple[str, str, Transform | None]


class Tie(Stage):
    """One parameter in several places: each target is its source, or a pure function of it.

    The raw tree holds each parameter once, at its owner; a tied place holds the empty node ``{"@tie": {}}``, so
    optimizer states and checkpoints have no copy, and gradients add up at the owner. A source may be tied itself. The
    place in the chain says what is shared::

        VarNoise(s) >> Tie(...)      one noise, drawn at the owner and shared
        Tie(...) >> VarNoise(s)      a noise for each use
        WeightNorm() >> Tie(...)     the normalized weight is shared, with its length
        Tie(...) >> WeightNorm()     the direction is shared, each use has a length of its own

    ``init`` verifies that each target equals its source's image, as far as values are known (under ``jax.jit`` only
    shapes and dtypes are), and is exact there.

    Args:
      ties: For each target path its source path, or a pair of source path and transform.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Tie({"output/kernel": ("embed/table", jnp.transpose)})
      >>> raw = p.init({"embed": {"table": jnp.ones((3, 2))}, "output": {"kernel": jnp.ones((2, 3))}})
      >>> jax.tree.map(jnp.shape, raw)
      {'embed': {'table': (3, 2)}, 'output': {'kernel': {'@tie': {}}}}
      >>> jax.tree.map(jnp.shape, p.apply(raw))
      {'embed': {'table': (3, 2)}, 'output': {'kernel': (2, 3)}}
    """

    ties: Any

    def __post_init__(self) -> None:
        ties = _entries(self.ties)
        _require_no_loop({target: source for target, source, _ in ties})
        object.__setattr__(self, "ties", ties)

    def __repr__(self) -> str:
        def value(source: str, transform: Transform | None) -> str:
            return repr(source) if transform is None else f"({source!r}, {code(transform)})"

        return f"Tie({{{', '.join(f'{target!r}: {value(source, f)}' for target, source, f in self.ties)}}})"

    def _init(self, tree: PyTree, key: Array | None) -> PyTree:
        del key
        leaves, slots, treedef = _raw.flatten(tree)
        values = {slot.draw: leaf for slot, leaf in zip(slots, leaves, strict=True)}
        arrays = [slot for slot, leaf in zip(slots, leaves, strict=True) if is_array(leaf)]
        places = self._places("init", arrays)
        for target, (source, transform) in places.items():
            got, want = (
                jax.eval_shape(jnp.asarray, values[target]),
                jax.eval_shape(lambda x, f=transform: f(x), values[source]),
            )
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                raise ValueError(
                    f"{call(self, 'init')}: {target!r} is {described(got)}, but its source {source!r} gives "
                    f"{described(want)}. Add the transform that takes the one to the other."
                )
            if _differ(values[target], values[source], transform):
                raise ValueError(
                    f"{call(self, 'init')}: {target!r} does not equal what its source {source!r} gives, so tying would "
                    f"change the model. Set the target to that first, or drop the tie."
                )
        empty: dict[str, PyTree] = {_raw.marker(self.kind, _raw.count(tree, self.kind) + 1): {}}
        return treedef.unflatten(
            [empty if slot.draw in places else leaf for slot, leaf in zip(slots, leaves, strict=True)]
        )

    def _apply(self, tree: PyTree, key: Array | None) -> PyTree:
        del key
        leaves, slots, treedef = _raw.flatten(tree, _raw.is_node(_raw.marker(self.kind, _raw.count(tree, self.kind))))
        values = {slot.draw: leaf for slot, leaf in zip(slots, leaves, strict=True)}
        for target, _, _ in self.ties:
            if all(slot.path != target for slot in slots):
                raise ValueError(
                    f"{call(self, 'apply')} found nothing at {target!r}, where `init` leaves an empty node, which "
                    f"flattened formats lose. Restore into the structure that `jax.eval_shape(p.init, params)` gives."
                )
        places = self._places("apply", slots)
        for target in places:
            if is_array(values[target]):
                raise ValueError(
                    f"{call(self, 'apply')} got a tree that never went through init: {target!r} holds a value of its "
                    f"own. Call `raw = p.init(params)` once, with the whole chain, and pass `raw`."
                )

        def value(path: str) -> Array:
            if path not in places:
                return values[path]
            source, transform = places[path]
            return transform(jnp.asarray(value(source)))

        return treedef.unflatten([value(slot.draw) for slot in slots])

    def _places(self, method: str, slots: list[Slot]) -> dict[str, tuple[str, Transform]]:
        """For each tied array, by its own path: the array it is made of, and the function."""
        places: dict[str, tuple[str, Transform]] = {}
        paths = {slot.path for slot in slots}
        own = {slot.draw for slot in slots}
        for target, source, transform in self.ties:
            for path in (target, source):
                if path not in paths:
                    near = ", ".join(map(repr, difflib.get_close_matches(path, paths, n=3, cutoff=0.0)))
                    raise ValueError(f"{call(self, method)} found no array at {path!r}; the nearest paths are {near}.")
            for draw in [slot.draw for slot in slots if slot.path == target]:
                image = source + draw.removeprefix(target)
                if image not in own:
                    raise ValueError(
                        f"{call(self, method)}: {target!r} and {source!r} hold different values, {draw!r} has no "
                        f"counterpart {image!r}. Put the tie last in the chain, to share the effective arrays."
                    )
                places[draw] = (image, transform or _same)
        return places


def _entries(ties: Any) -> tuple[Tied, ...]:
    if not isinstance(ties, Mapping | tuple | list):
        raise TypeError(
            f"Tie takes a dict of target paths and their sources, but got {ties!r} of type {type(ties).__name__}."
        )
    items = ties.items() if isinstance(ties, Mapping) else [(t[0], t[1] if len(t) == 2 else t[1:]) for t in ties]
    entries = tuple(_entry(target, value) for target, value in items)
    if not entries:
        raise ValueError("Tie got no ties. Name at least one target and its source.")
    sources: dict[str, str] = {}
    for target, source, _ in entries:
        if target in sources:
            raise ValueError(
                f"Tie got two sources for {target!r}: {sources[target]!r} and {source!r}. Leave one of them out."
            )
        sources[target] = source
    return entries


def _require_no_loop(sources: Mapping[str, str]) -> None:
    for target in sources:
        loop = [target]
        while (source := sources.get(loop[-1])) is not None:
            if source in loop:
                circle = " -> ".join([*loop[loop.index(source) :], source])
                raise ValueError(f"Tie got a loop: {circle}. Leave one of them untied; it owns the parameter.")
            loop.append(source)


def _entry(target: Any, value: Any) -> Tied:
    match target, value:
        case str(), str():
            return target, value, None
        case str(), [str() as source] | [str() as source, None]:
            return target, source, None
        case str(), [str(), transform] if callable(transform):
            return target, *value
        case _:
            raise TypeError(
                f"Tie takes a path, or a pair of path and function, for each target path, "
                f"but got {target!r}: {value!r}."
            )


def _same(x: Array) -> Array:
    return x


def _numbers(x: Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def _differ(target: Any, source: Any, transform: Transform) -> bool:
    """Whether values are known and further apart than rounding."""
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in (target, source)):
        return False
    got, want = (_numbers(x) for x in (jnp.asarray(target), transform(jnp.asarray(source))))
    eps = float(jnp.finfo(got.dtype).eps) if jnp.issubdtype(got.dtype, jnp.inexact) else 0.0
    wide = np.result_type(np.float64, got.dtype) if got.dtype.kind != "V" else np.float64
    return not np.allclose(got.astype(wide), want.astype(wide), rtol=4 * eps, atol=0, equal_nan=True)
