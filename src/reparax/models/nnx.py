"""Wraps a model and its chain in a flax nnx module, for trainers that own the loss and call ``model(x)``."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Any, ClassVar, Literal

import jax

from reparax.core.boxes import value_in
from reparax.core.chain import Parametrization
from reparax.core.names import dir_of
from reparax.core.paths import Elsewhere, PyTree, items, path_text
from reparax.core.raw import holds_markers
from reparax.models import base
from reparax.training import param_labels

__dir__ = dir_of("nnx")

nnx: Any = base.import_library("flax.nnx", "rpx.nnx", "flax")
errors: Any = base.import_library("flax.errors", "rpx.nnx", "flax")

_WHO = "rpx.nnx.Parametrized"
_WITH_RNGS = f"{_WHO}(model, p, rngs=nnx.Rngs(0))"
"""Code that constructs the wrapper with random streams, for error messages."""
_PLAIN = "plain"
"""The metadata key under which a variable with raw values stores the type of the model's own variable."""
_HIDDEN = object()
"""Stands for a variable that is not a parameter, or for a deleted attribute."""

Outputs = dict[Any, tuple[Any, Any]]
"""Maps the :func:`_identity` of each parameter to the parameter and its replacement. A shared variable has a single
entry."""
Copies = dict[int, tuple[Any, Any]]
"""Maps the id of each node of a graph to the node and its copy. Holding the node keeps its id from being reused."""


class Fixed(nnx.Variable):
    """A variable with a fixed raw value. It is not an ``nnx.Param``, so optimizers do not change it."""

    holds_parameter: ClassVar[bool] = True


class Parametrized(nnx.Module):
    """A model whose variables hold the raw values of a chain, and which computes effective weights in each call.

    The wrapper has the methods of the model and is called like it, so the loss does not change. Each call computes the
    effective weights once, with one draw of the noise, even if the model reads a weight twice. ``model.raw`` holds the
    raw tree, as a module of the model's class: store ``nnx.state(model.raw)``, and pass ``model.raw`` to ``p.check``,
    ``to_peft`` and other functions that take raw trees. Calls change the model's other variables and attributes, such
    as statistics and caches, as in the plain model. ``nnx.jit``, ``nnx.vmap``, ``nnx.scan``, ``nnx.remat`` and
    ``nnx.get_partition_spec`` treat the wrapper like any module, and it may be part of another module.

    An optimizer selects the trainable values by the types of variables. Trainable values, including arrays that no
    stage replaces, have the type ``variable``, a subclass of ``nnx.Param``, and all others are :class:`Fixed`. The
    model itself reads variables of its original types, and :meth:`fold` returns them.

    A chain with noise draws from a stream, as ``nnx.Dropout`` does: the stream ``noise`` of ``rngs``, or the default
    stream. As for ``nnx.Dropout``, ``model.deterministic = True`` switches noise off; ``model.eval()`` and
    ``model.train()`` set this flag together with the flags of the model's own layers. An argument of a call, as in
    ``model(x, deterministic=True)``, only affects the model, not the chain.

    If ``p.update`` changes fixed values, as power iteration does, each call in training updates them before it
    computes the weights; calls after ``model.eval()`` do not. If a traced function closes over the model, as the loss
    of a generator closes over the discriminator, nnx does not allow variables to change, so fixed values stay the same.
    Stages whose update also moves weights (:class:`RigL`, :class:`SET`) are updated only through :meth:`update`.

    A submodule with parameters, such as ``model.encoder``, can be called and read as in the plain model, and its
    counters, caches and flags change as in the plain model. Its parameters are computed from raw values, so setting
    them raises an error, both outside and inside a call. Passing a submodule alone to ``nnx.jit``, ``nnx.state`` or an
    optimizer also raises an error, because a submodule has no values of its own. Pass the whole model. To replace raw
    values, use ``nnx.update(model.raw, nnx.to_pure_dict(values))``.

    Args:
      model: The model. Its parameters are copied, so models that share them do not share the raw values. The wrapper
        uses the model's other variables without copying them.
      p: The chain.
      rngs: ``nnx.Rngs`` or one of its streams, for noise and for random initial values. Initial values use the stream
        ``params``.
      variable: The type of the trainable variables, such as ``nnx.LoRAParam``. Trainers select variables by type.
      deterministic: Whether to replace noise by its mean.
      raw: A raw tree that ``p.init(model)`` returned, to use instead of initializing a new one.
      updates: ``"by hand"`` if the trainer calls :meth:`update`, so that no call of the model updates fixed values.

    Raises:
      TypeError: If ``model`` is not an ``nnx.Module``, or has modules that are not pytrees; if ``p`` is not a chain; if
        ``rngs`` is neither ``nnx.Rngs`` nor a stream of it; if ``variable`` is not a subclass of ``nnx.Param``; or if
        ``raw`` is of another class than ``model``.
      ValueError: If initial values are random and there are no ``rngs``; if ``p.init`` raises an error for the model;
        if ``raw`` and the model have parameters at different paths; or if a stage must be updated by hand, and
        ``updates`` is None.

    Example:
      >>> import jax.numpy as jnp, optax, reparax as rpx
      >>> from flax import nnx
      >>> p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
      >>> model = rpx.nnx.Parametrized(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), p, rngs=nnx.Rngs(1))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> x = jnp.ones((4, 3))
      >>> loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
      >>> _ = optimizer.update(model, grads)
      >>> model.eval()
      >>> bool(jnp.allclose(model(x), model.fold()(x)))
      True
    """

    def __init__(
        self,
        model: Any,
        p: Parametrization,
        *,
        rngs: Any = None,
        variable: type[Any] = nnx.Param,
        deterministic: bool = False,
        raw: Any = None,
        updates: Literal["by hand"] | None = None,
    ) -> None:
        """Wraps ``model``, with the raw tree of ``p`` in place of its variables."""
        self.p = base.check_arguments(_WHO, model, p, nnx.Module, "nnx.Module")
        base.require_reachable(_WHO, model, Parametrized, [*dir(nnx.Module), "set_view"])
        self._updates_in_calls = base.check_updates(_WHO, p, updates, "model.update()")
        _require_pytrees(model)
        _require_param_class(variable)
        start, noise = _find_stream(rngs, "params"), _find_stream(rngs, "noise")
        if raw is None:
            key = base.start_key(p, start and start() if p.random_init else None, _WITH_RNGS)
            replacements = _outputs(lambda tree: _with_types_by_training(p.init(tree, key), variable), model)
        else:
            _require_same_class(model, raw)
            stored = _outputs(lambda tree: _with_types_by_training(base.require_made_by(p, tree), variable), raw)
            replacements = _match_by_path(model, raw, stored)
        self.rngs: Any = noise.fork() if noise is not None and (p.stochastic or p.has_update) else nnx.data(None)
        self.deterministic = deterministic
        # Set `raw` last: once it is set, `__setattr__` sets new attributes on the model instead of the wrapper.
        self.raw = nnx.data(_copy_graph(model, replacements, {}, anew=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self._call_method(self.raw, "__call__", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the model, or a method that computes the effective weights when it is called."""
        return self._attribute(self, vars(self).get("raw"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the model, as ``set_attributes`` does.

        Raises:
          ValueError: If the old or the new value has parameters, because only the chain can initialize these.
        """
        raw = vars(self).get("raw")
        if raw is None or name in vars(self):
            super().__setattr__(name, value)
        else:
            _set_attribute(raw, name, value)

    def effective(self) -> Any:
        """Returns the plain model with one draw of the effective weights, for several calls with the same noise.

        The result shares its other variables, and its modules without parameters, with the wrapped model. Other changes
        to the result do not affect the wrapped model.

        Raises:
          ValueError: If the chain draws random numbers, and there is neither a stream nor ``deterministic``.
        """
        return self._copy_effective({}, lambda variable: variable)

    def fold(self) -> Any:
        """Returns the plain model with effective weights without noise. It shares no variables with the wrapper."""
        return nnx.clone(_copy_graph(self.raw, _outputs(self.p.fold, self.raw), {}))

    def update(self, grads: PyTree = None) -> None:
        """Updates the fixed values for one training step, as :meth:`Parametrization.update` does.

        Args:
          grads: The gradient with respect to the plain model, for stages that use it, such as :class:`RigL`.
        """
        key = None if self.rngs is None else self.rngs()
        self._set_variables(lambda raw: self.p.update(raw, key, grads), nnx.Variable)

    def set_view(self, *, deterministic: bool | None = None, **kwargs: Any) -> dict[str, Any]:
        """Sets ``deterministic`` if ``nnx.view`` passes it, and returns all other arguments of ``nnx.view``."""
        if deterministic is not None:
            self.deterministic = deterministic
        return kwargs

    def _set_variables(self, verb: Callable[[PyTree], PyTree], kind: type[Any]) -> None:
        """Sets all raw variables of type ``kind`` to their values in ``verb(raw)``."""
        for node, output in _outputs(verb, self.raw).values():
            for variable, new_variable in zip(_variables_of(node), _variables_of(output), strict=True):
                if isinstance(variable, kind) and jax.tree.leaves(new_variable):
                    variable[...] = new_variable[...]

    def _copy_effective(self, copies: Copies, convert: Callable[[Any], Any]) -> Any:
        """Returns a copy of the model with one draw of the effective weights.

        Applies ``convert`` to the effective variables, and records each copied node in ``copies``.
        """
        p = self.p.deterministic if self.deterministic else self.p
        if p.stochastic and self.rngs is None:
            raise base.needs_stream_error(p, "none", _WITH_RNGS, "`model.deterministic = True`")
        key = self.rngs() if p.stochastic else None
        outputs = _outputs(lambda tree: p.apply(tree, key), self.raw)
        return _copy_graph(self.raw, {i: (node, convert(new)) for i, (node, new) in outputs.items()}, copies)

    def _attribute(self, owner: Any, module: Any, name: str) -> Any:
        """Returns an attribute of a module in the raw model. Errors name ``owner``, the wrapper or a part of it."""

        def read_instance(name: str) -> Any:
            value = vars(module)[name]
            if not _holds_parameters(value):
                return value
            return _Part(self, value) if isinstance(value, nnx.Pytree) else read_effective(name)

        def read_effective(name: str) -> Any:
            return self._run(module, lambda effective: getattr(effective, name))

        plain = getattr(nnx.Module, name, None)
        if module is not None and plain is not None and getattr(type(module), name) is plain:
            return getattr(module, name)  # Methods of `nnx.Module`, such as `eval`, read no parameters.
        call_method = functools.partial(self._call_method, module)
        return base.find_attribute(owner, module, name, read_instance, read_effective, call_method)

    def _call_method(self, module: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of a module with effective weights. In training, updates the fixed values first."""
        if self._updates_in_calls and not self.deterministic:
            # Variables of a model from another trace, such as the discriminator in a generator's loss, cannot change.
            with contextlib.suppress(errors.TraceContextError):
                self._set_variables(lambda raw: base.updated(self.p, raw), Fixed)
        return self._run(module, lambda effective: getattr(effective, name)(*args, **kwargs))

    def _run(self, module: Any, fun: Callable[[Any], Any]) -> Any:
        """Calls ``fun`` on a copy of a module with effective weights. Attributes that ``fun`` sets are kept."""
        copies: Copies = {}
        self._copy_effective(copies, _for_reading)
        result = fun(copies[id(module)][1])
        _keep_changes(copies)
        return self._with_parts(result, {id(copy): node for node, copy in copies.values() if copy is not node})

    def _with_parts(self, result: Any, raw_nodes: dict[int, Any]) -> Any:
        """Replaces modules with effective weights in the result of a call by ``_Part`` objects of this model.

        ``raw_nodes`` maps the id of each effective module or variable to its raw counterpart.
        """
        result = list(result) if isinstance(result, ItemsView | ValuesView) else result
        if not any(id(x) in raw_nodes for x in jax.tree.leaves(result, is_leaf=_is_node)):
            return result

        def as_part(x: Any) -> Any:
            return _Part(self, raw_nodes[id(x)]) if id(x) in raw_nodes and isinstance(x, nnx.Pytree) else x

        return jax.tree.map(as_part, result, is_leaf=_is_node)


class _Part:
    """A module with parameters inside a wrapped model: calls, attributes and changes go through the whole model.

    JAX and nnx cannot flatten a ``_Part``, because changes to a flattened copy would be lost.
    """

    def __init__(self, whole: Parametrized, module: Any) -> None:
        vars(self).update(_whole=whole, _module=module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole._call_method(self._module, "__call__", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._whole._attribute(self._module, self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _set_attribute(self._module, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._whole._run(self._module, lambda module: module[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._whole._run(self._module, lambda module: module.__setitem__(key, value))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._whole._run(self._module, list))

    def __len__(self) -> int:
        return len(self._module)

    def __repr__(self) -> str:
        return f"a part of {_WHO}, {self._module!r}"


def _refuse_part(part: _Part) -> Any:
    """Raises an error when JAX looks for arrays in a ``_Part``."""
    raise TypeError(
        f"A {type(part._module).__name__} inside {_WHO} can be called and read, but JAX and nnx cannot take it apart, "
        "because its parameters are computed from raw values of the whole model. Pass the whole model, "
        "`nnx.jit(lambda model, x: model.part(x))(model, x)`, or take its values from `model.raw` or, as a copy, from "
        "`model.effective()`."
    )


jax.tree_util.register_pytree_node(_Part, _refuse_part, _Part)


def _refuse_parameters(name: str, value: Any) -> None:
    """Raises the error for setting an attribute whose old or new value has parameters."""
    raise ValueError(
        f"{_WHO} computes parameters from raw values, so {name!r}, whose old or new value has parameters, cannot be "
        f"set to a value of type {type(value).__name__}. Change the plain model and wrap it: `model = model.fold()`, "
        f"`model.{name} = ...`, `model = {_WHO}(model, p)`."
    )


def _for_reading(variable: Any) -> Any:
    """Returns a read-only copy of an nnx variable. Returns any other node unchanged."""
    if not _is_variable(variable):
        return variable
    return _type_for_reading(type(variable)).from_metadata(value_in(variable), variable.get_metadata())


@functools.cache
def _type_for_reading(kind: type[Any]) -> type[Any]:
    """Returns a read-only subclass of a variable type. Only nnx transforms can set it, to write back their inputs."""

    def refuse(variable: Any, *_: Any) -> Any:
        raise ValueError(
            f"{_WHO} computed this {kind.__name__} from its raw values, so a change to it would be lost. Set the raw "
            "values in `model.raw`, or set the weights of the plain model before you wrap it."
        )

    def set_attribute(variable: Any, name: str, value: Any) -> None:
        set_plain: Any = kind.__setattr__ if _is_called_by_transform() else refuse
        set_plain(variable, name, value)

    return type(kind.__name__, (kind,), {"__setattr__": set_attribute, "copy_from": refuse})


def _is_called_by_transform() -> bool:
    """Returns whether an nnx transform called this function's caller, with only flax and JAX code in between."""
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back
    while frame:
        module = frame.f_globals["__name__"]
        if module.startswith("flax.nnx.transforms."):
            return True
        if not module.startswith(("flax.", "jax.")):
            return False
        frame = frame.f_back
    return False


def _set_attribute(module: Any, name: str, value: Any) -> None:
    """Sets an attribute of a raw module. Raises an error if the old or the new value has parameters."""
    if _holds_parameters([vars(module).get(name), value]):
        _refuse_parameters(name, value)
    setattr(module, name, value)


def _require_pytrees(model: Any) -> None:
    """Raises an error if a model has modules that are not pytrees, because JAX sees no parameters in them."""
    for names, leaf in items(model, is_leaf=_is_variable):
        if isinstance(leaf, nnx.Module):
            name = type(leaf).__name__
            where = f" at {path_text(names)!r}" if names else ""
            raise TypeError(
                f"{_WHO} takes modules that are pytrees, but got {name}{where}, whose class has `pytree=False`. Write "
                f"`class {name}(nnx.Module)`."
            )


def _require_param_class(variable: Any) -> None:
    """Raises an error unless ``variable`` is a subclass of ``nnx.Param``."""
    if not (isinstance(variable, type) and issubclass(variable, nnx.Param)):
        raise TypeError(
            f"{_WHO} takes a subclass of `nnx.Param` as `variable`, but got "
            f"{getattr(variable, '__name__', repr(variable))}. Write `variable=nnx.LoRAParam`, or a class of your own, "
            "`class Mine(nnx.Param)`."
        )


def _require_same_class(model: Any, raw: Any) -> None:
    """Raises an error if a raw tree is not of the same class as the model."""
    if type(raw) is not type(model):
        raise TypeError(
            f"{_WHO} takes a raw tree that is a {type(model).__name__}, as `p.init(model)` gives it, but got "
            f"{type(raw).__name__}. To replace only values, use `nnx.update(model.raw, nnx.to_pure_dict(raw))`."
        )


def _find_stream(rngs: Any, name: str) -> Any:
    """Returns the random stream of this name, or the default stream; None if there is neither."""
    if rngs is None or isinstance(rngs, nnx.RngStream):
        return rngs
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"{_WHO} takes `nnx.Rngs` or one of its streams as `rngs`, but got {type(rngs).__name__}. Write "
            f"`{_WITH_RNGS}`."
        )
    return rngs[name] if name in rngs or "default" in rngs else None


def _is_variable(x: object) -> bool:
    """Returns whether a node is an nnx variable."""
    return isinstance(x, nnx.Variable)


def _is_parameter(x: object) -> bool:
    """Returns whether a node is a parameter variable, with a raw value or an effective one."""
    return isinstance(x, nnx.Param | Fixed)


def _is_place(x: object) -> bool:
    """Returns whether a node of a module is a variable, or a marker dict in place of one."""
    return _is_variable(x) or holds_markers(x)


def _is_node(x: object) -> bool:
    """Returns whether a node is a module or a variable."""
    return isinstance(x, nnx.Pytree) or _is_variable(x)


def _variables_of(tree: PyTree) -> list[Any]:
    """Returns the nnx variables of a tree as a list."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_variable) if _is_variable(x)]


def _holds_parameters(tree: PyTree) -> bool:
    """Returns whether a tree holds raw or effective parameters, or a marker dict, such as one for a tied parameter."""
    return any(_is_parameter(x) or holds_markers(x) for x in jax.tree.leaves(tree, is_leaf=_is_place))


def _identity(node: Any) -> Any:
    """Returns a hashable key that is equal for nodes that consist of the same nnx variables."""
    return tuple(map(id, _variables_of(node))) or id(node)


def _outputs(fun: Callable[[PyTree], PyTree], module: Any) -> Outputs:
    """Calls ``fun`` on a module's parameters, and maps each parameter to its output.

    A parameter at several paths is passed to ``fun`` only at the first of them.
    """
    nodes, treedef = jax.tree.flatten(module, is_leaf=_is_place)
    first_index: dict[Any, int] = {}
    leaves: list[Any] = [_HIDDEN] * len(nodes)
    for i, node in enumerate(nodes):
        if not _is_variable(node) or _is_parameter(node):
            first = first_index.setdefault(_identity(node), i)
            leaves[i] = node if first == i else Elsewhere(items(module, _is_place)[first][0])
    tree = treedef.unflatten(leaves)
    outputs = treedef.flatten_up_to(fun(_to_model_types(tree)))
    return {identity: (nodes[i], outputs[i]) for identity, i in first_index.items()}


def _copy_graph(node: Any, replacements: Outputs, copies: Copies, *, anew: bool = False) -> Any:
    """Copies a graph of nnx modules with some leaves replaced, and records the copies in ``copies``.

    An object that occurs several times in the graph is copied once. Modules without a replaced leaf are copied only if
    ``anew`` is True.
    """
    if id(node) not in copies:
        children, treedef = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
        if _is_place(node) or jax.tree_util.treedef_is_leaf(treedef):
            copy = replacements.get(_identity(node), (node, node))[1]
        else:
            parts = [_copy_graph(child, replacements, copies, anew=anew) for child in children]
            is_same = all(part is child for part, child in zip(parts, children, strict=True))
            copy = node if is_same and not anew else treedef.unflatten(parts)
        copies[id(node)] = node, copy
    return copies[id(node)][1]


def _match_by_path(model: Any, raw: Any, replacements: Outputs) -> Outputs:
    """Maps each parameter of a model to the replacement of the raw model's parameter at the same path."""
    nodes, raw_nodes = _parameters_by_path(model), _parameters_by_path(raw)
    if different := sorted(nodes.keys() ^ raw_nodes.keys()):
        raise ValueError(
            f"{_WHO} takes a raw tree of this model, as `p.init(model)` gives it, but only one of the two has a "
            f"parameter at {different[0]!r}."
        )
    return {_identity(node): (node, replacements[_identity(raw_nodes[path])][1]) for path, node in nodes.items()}


def _parameters_by_path(tree: PyTree) -> dict[str, Any]:
    """Returns a model's parameters by path. Includes marker dicts that replace parameters, such as tied ones."""
    places = ((path_text(names), node) for names, node in items(tree, _is_place))
    return {path: node for path, node in places if _is_parameter(node) or holds_markers(node)}


def _keep_changes(copies: Copies) -> None:
    """Writes attributes that a call has set on copies of modules, such as caches and flags, to the raw modules.

    Raises:
      ValueError: If the call has set parameters.
    """
    originals: Copies = {id(copy): (copy, node) for node, copy in copies.values() if _is_node(copy)}
    for module, copy in copies.values():
        if copy is not module and isinstance(copy, nnx.Pytree):
            _set_changed(module, copy, _changed_attributes(module, copy, copies), originals)


def _changed_attributes(module: Any, copy: Any, copies: Copies) -> dict[str, Any]:
    """Returns the attributes in which a copy differs from its module, by name; a deleted attribute is ``_HIDDEN``.

    Raises:
      ValueError: If the old or the new value of a changed attribute holds parameters.
    """
    changed: dict[str, Any] = {}
    for name in [name for name in {**vars(module), **vars(copy)} if not name.startswith("_pytree__")]:
        value, raw_value = (vars(node).get(name, _HIDDEN) for node in (copy, module))
        value_before = copies[id(raw_value)][1] if id(raw_value) in copies else raw_value
        if _is_same(value, value_before):
            continue
        if _holds_parameters([value_before, value]):
            _refuse_parameters(name, value)
        changed[name] = value
    return changed


def _set_changed(module: Any, copy: Any, attributes: dict[str, Any], originals: Copies) -> None:
    """Sets the changed attributes of a copied module on the raw module, with raw nodes in place of copied ones."""
    data_names = {names[0] for names, _ in items(copy, lambda x: x is not copy)} if attributes else set()
    for name, value in attributes.items():
        if value is _HIDDEN:
            delattr(module, name)
        else:
            mark = nnx.data if name in data_names else nnx.static
            setattr(module, name, mark(_copy_graph(value, {}, originals)))


def _is_same(value: Any, value_before: Any) -> bool:
    """Returns whether an attribute has the same structure and variables as before, and equal numbers and strings."""
    if value is value_before:
        return True
    nodes, treedef = jax.tree.flatten(value, is_leaf=_is_variable)
    nodes_before, treedef_before = jax.tree.flatten(value_before, is_leaf=_is_variable)
    plain = bool | int | float | complex | str | bytes
    return treedef == treedef_before and all(
        x is y or (isinstance(x, plain) and type(x) is type(y) and x == y)
        for x, y in zip(nodes, nodes_before, strict=True)
    )


def _with_types_by_training(raw: PyTree, variable: type[Any]) -> PyTree:
    """Converts the trainable variables of a raw tree to type ``variable`` and all others to ``Fixed``.

    :func:`_to_model_types` is the inverse.
    """

    def by_training(node: Any, label: Any) -> Any:
        if not _is_variable(node):
            return node
        kind = variable if "free" in jax.tree.leaves(label) else Fixed
        return kind.from_metadata(value_in(node), {**node.get_metadata(), _PLAIN: type(node)})

    return jax.tree.map(by_training, raw, param_labels(raw), is_leaf=_is_variable)


def _to_model_types(raw: PyTree) -> PyTree:
    """Converts the variables of a raw tree back to the types that the model's own variables have."""

    def plain(node: Any) -> Any:
        if not _is_variable(node):
            return node
        metadata = dict(node.get_metadata())
        default = nnx.Param if isinstance(node, Fixed) else type(node)  # `nnx.update` drops metadata.
        return metadata.pop(_PLAIN, default).from_metadata(value_in(node), metadata)

    return jax.tree.map(plain, raw, is_leaf=_is_variable)
