"""Modules of nnx: their variables and streams, and what a call sets in them."""

from typing import Any

import jax

from reparax.core.paths import PyTree, items, path_text
from reparax.numerics.imported import import_library

nnx: Any = import_library("flax.nnx", "rpx.nnx", "flax")


WITH_RNGS = "rpx.nnx.Parametrized(model, p, rngs=nnx.Rngs(0))"
"""How to give streams."""


def is_variable(x: object) -> bool:
    """Whether a node is a variable of nnx."""
    return isinstance(x, nnx.Variable)


def variables_of(tree: PyTree) -> list[Any]:
    """The variables of a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(x)]


def expect_pytree(model: Any) -> None:
    """Refuses modules in which JAX sees no parameters."""
    for names, leaf in items(model, is_leaf=is_variable):
        if isinstance(leaf, nnx.Module):
            name, where = type(leaf).__name__, f" at {path_text(names)!r}" if names else ""
            raise TypeError(
                f"rpx.nnx.Parametrized takes modules that are pytrees, but got {name}{where}, whose class has "
                f"`pytree=False`. Write `class {name}(nnx.Module)`."
            )


def check_variable(variable: Any) -> None:
    """Refuses types of variables that are not those of parameters."""
    if not (isinstance(variable, type) and issubclass(variable, nnx.Param)):
        raise TypeError(
            "rpx.nnx.Parametrized takes a subclass of `nnx.Param` as `variable`, but got "
            f"{getattr(variable, '__name__', repr(variable))}. Write `variable=nnx.LoRAParam`, or a class of your own, "
            "`class Mine(nnx.Param)`."
        )


def find_stream(rngs: Any, name: str) -> Any:
    """The stream of a name, or the default one; None without either."""
    if rngs is None or isinstance(rngs, nnx.RngStream):
        return rngs
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"rpx.nnx.Parametrized takes `nnx.Rngs` or one of its streams as `rngs`, but got {type(rngs).__name__}. "
            f"Write `{WITH_RNGS}`."
        )
    return rngs[name] if name in rngs or "default" in rngs else None


def refuse_value(variable: Any, value: Any) -> Any:
    """What nnx calls when the value of a parameter of the effective model is set."""
    raise ValueError(
        f"rpx.nnx.Parametrized made this {type(variable).__name__} from its raw values for reading, so what is set in "
        "it is lost. Set raw values, in `model.raw`; for weights of the plain model, set them in it, and wrap it then."
    )


def keep_changes(effective: Any, raw: Any) -> None:
    """Gives the raw model what a call has set in the effective one: a cache, what `sow` records, a flag."""
    made = dict(_modules(effective))
    for path, module in _modules(raw):
        for name, value in vars(made.get(path, module)).items():
            own = vars(module)
            if not name.startswith("_pytree__") and (name not in own or _is_set(value, own[name])):
                setattr(module, name, value)


def _modules(model: Any) -> list[tuple[Any, Any]]:
    """The modules of a model by their paths. flax 0.12.0 has no ``nnx.iter_modules``, and later ones no such method."""
    return [(path, x) for path, x in nnx.iter_graph(model) if isinstance(x, nnx.Module)]


def _is_set(value: Any, before: Any) -> bool:
    """Whether an attribute is another one than before. Modules are compared by their own attributes."""
    if isinstance(value, nnx.Module) or any(isinstance(x, nnx.Param) for x in variables_of(value)):
        return False
    (nodes, treedef), (old, olddef) = (jax.tree.flatten(x, is_leaf=is_variable) for x in (value, before))
    return treedef != olddef or any(x is not y for x, y in zip(nodes, old, strict=True))
