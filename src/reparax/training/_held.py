"""Arrays of an optimizer's state between two steps, as raw values of a parametrization: codes and scales."""

import math
import sys
from collections.abc import Callable
from typing import Any

import jax

from reparax._core.algebra import Parametrization
from reparax._numerics.arithmetic import is_inexact
from reparax._tree.paths import Names, PyTree, flatten_with_names, is_array, path_text
from reparax._tree.raw import holds_markers


@jax.tree_util.register_pytree_with_keys_class
class StateArray:
    """An array of a state, as raw values of a parametrization.

    Attributes:
      raw: The raw values, under their markers.
      p: The parametrization.
      path: The path of the array in the state.
      shape: Its shape. An array of more than two axes is held as the matrix of its last axis.
    """

    def __init__(self, raw: PyTree, p: Parametrization, path: str, shape: tuple[int, ...]) -> None:
        self.raw, self.p, self.path, self.shape = raw, p, path, shape

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The raw values, by name."""
        return [(jax.tree_util.GetAttrKey("raw"), self.raw)], (self.p, self.path, self.shape)

    @classmethod
    def tree_unflatten(cls, facts: tuple[Parametrization, str, tuple[int, ...]], children: Any) -> "StateArray":
        """The node of new values."""
        return cls(children[0], *facts)

    def __repr__(self) -> str:
        return f"Held({self.raw!r}, {self.p!r})"


def store(p: Parametrization, state: PyTree) -> PyTree:
    """The state with raw values of ``p`` for the arrays that it selects, unless these are no smaller."""
    _tell_flax()
    paths, leaves, treedef = flatten_with_names(state)
    numbers = [(path, x) for path, x in zip(paths, leaves, strict=True) if is_array(x) and is_inexact(x)]
    raw = p.init({plain_path(path): _as_matrix(x) for path, x in numbers}) if numbers else {}

    def as_stored(path: Names, x: Any) -> Any:
        values = raw.get(plain_path(path))
        smaller = holds_markers(values) and sum(y.nbytes for y in jax.tree.leaves(values)) < x.nbytes
        return StateArray(values, p, plain_path(path), tuple(x.shape)) if smaller else x

    return treedef.unflatten([as_stored(path, x) for path, x in zip(paths, leaves, strict=True)])


def stored_paths(p: Parametrization, state: PyTree) -> set[str]:
    """The paths of the arrays that ``store`` would hold in another form."""
    nodes = jax.tree.leaves(jax.eval_shape(lambda state: store(p, state), state), is_leaf=_is_held)
    return {node.path for node in nodes if _is_held(node)}


def _tell_flax() -> None:
    """Lets ``flax.serialization`` write held arrays, where it is imported."""
    flax: Any = sys.modules.get("flax.serialization")
    if flax is not None:
        flax.register_serialization_state(
            StateArray,
            lambda x: {"raw": flax.to_state_dict(x.raw)},
            lambda x, state: StateArray(flax.from_state_dict(x.raw, state["raw"]), x.p, x.path, x.shape),
            override=True,
        )


def with_held_arrays(state: PyTree, init: Callable[[], PyTree]) -> PyTree:
    """A state whose held arrays another library, such as nnx, has written as trees; any other state unchanged."""
    if any(map(_is_held, jax.tree.leaves(state, is_leaf=_is_held))):
        return state
    leaves, (types, treedef) = jax.tree.leaves(state), jax.tree.flatten(jax.eval_shape(init))
    same_shapes = [x.shape for x in leaves] == [x.shape for x in types]
    return treedef.unflatten(leaves) if same_shapes else state


def open_state(state: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """The state with plain arrays, and the function that stores such a state again."""
    leaves, treedef = jax.tree.flatten(state, is_leaf=_is_held)
    nodes = [x for x in leaves if _is_held(x)]
    if not nodes:
        return state, lambda state: state
    p = nodes[0].p
    arrays = p.apply({node.path: node.raw for node in nodes})
    plain = [arrays[x.path].reshape(x.shape) if _is_held(x) else x for x in leaves]
    return treedef.unflatten(plain), lambda state: store(p, state)


def plain_path(path: Names) -> str:
    """The path of an array of a state, in which markers are plain names: they belong to the raw tree of the model."""
    return path_text(tuple(name.removeprefix("@") for name in path))


def _as_matrix(x: Any) -> Any:
    """An array of more than two axes as a matrix with its last axis as columns."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.ndim > 2 else x


def _is_held(x: object) -> bool:
    """Whether a node is an array that is stored in another form."""
    return isinstance(x, StateArray)
