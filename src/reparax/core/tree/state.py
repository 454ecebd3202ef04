"""Which leaves of a model's tree are its state, not its parameters."""

import jax

from reparax.core.tree.paths import PyTree, flatten_with_names, has_ancestor
from reparax.core.tree.raw import parameter_path


def state_flags(tree: PyTree) -> list[bool]:
    """For each leaf, whether it is model state: an nnx variable other than ``Param``, or a linen collection.

    The collection ``params`` is not state. An array directly beside ``params``, such as a temperature, is a parameter.
    """
    paths, nodes, _ = flatten_with_names(tree, lambda x: has_ancestor(x, "Variable"))
    collections = {path[0] for path in paths if path}
    flags: list[bool] = []
    for path, node in zip(paths, nodes, strict=True):
        other_variable = has_ancestor(node, "Variable") and not _holds_parameter(node)
        beside_params = "params" in collections and path[0] != "params" and "/" in parameter_path(path)
        other_collection = "batch_stats" in path or beside_params
        flags += [other_variable or other_collection] * len(jax.tree.leaves(node))
    return flags


def _holds_parameter(variable: object) -> bool:
    """Whether a variable is a ``Param``, or a raw value of one: ``rpx.nnx.Fixed``."""
    return has_ancestor(variable, "Param") or getattr(type(variable), "holds_parameter", False)
