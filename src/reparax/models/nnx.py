"""A flax nnx module that is a model and its chain: for trainers that own the loss and call ``model(x)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from reparax.core.chain import Parametrization
from reparax.core.names import dir_of
from reparax.core.paths import PyTree
from reparax.core.raw import holds_markers
from reparax.models.attributes import find_attribute
from reparax.models.chains import (
    check_chain,
    check_model,
    needs_start_error,
    needs_stream_error,
    require_made_by,
)
from reparax.models.nnx_modules import (
    WITH_RNGS,
    check_variable,
    expect_pytree,
    find_stream,
    is_variable,
    keep_changes,
    refuse_value,
    variables_of,
)
from reparax.numerics.imported import import_library
from reparax.training import param_labels

__dir__ = dir_of("nnx")

nnx: Any = import_library("flax.nnx", "rpx.nnx", "flax")


class Fixed(nnx.Variable):
    """A raw value that does not train: it is no ``nnx.Param``, so optimizers leave it alone."""

    holds_parameter: ClassVar[bool] = True


class Parametrized(nnx.Module):
    """A model that reads the effective tree of a chain, while its variables hold the raw values.

    It is called like the model, by any method, and the loss does not change. Each call makes the effective tree once,
    with one draw, even if the model reads a weight twice. ``model.raw`` holds the raw tree, as a module of the model's
    class: store ``nnx.state(model.raw)``, and pass ``model.raw`` to ``p.check``, ``to_peft`` and other functions of raw
    trees. The model's other variables and attributes, such as statistics and caches, change in the call as before, and
    ``nnx.jit``, ``nnx.vmap``, ``nnx.scan``, ``nnx.remat`` and ``nnx.get_partition_spec`` treat the wrapped model like
    any module. It may be part of another module.

    An optimizer selects the values that train by the types of variables. Values that train, including arrays that no
    stage replaces, have the type ``variable``, a subclass of ``nnx.Param``, and all others are :class:`Fixed`. The
    model itself reads, and :meth:`fold` returns, variables of its own types.

    A chain with noise draws from a stream, as ``nnx.Dropout`` does: ``noise`` of ``rngs``, or the default one. As for
    ``nnx.Dropout``, ``model.deterministic`` switches it off; ``model.eval()`` and ``model.train()`` set it together
    with the flags of the model's own layers. An argument of a call, ``model(x, deterministic=True)``, is for the model
    alone.

    Attributes with parameters are those of the effective model, made anew, so changes inside ``model.l1`` are lost, and
    setting its parameters is refused: change ``model.raw.l1``. To replace raw values, use ``nnx.update(model.raw,
    nnx.to_pure_dict(values))``.

    Args:
      model: The model. Its parameters are copied, so models that share them do not share the raw values; its other
        variables become those of the wrapped one.
      p: The chain.
      rngs: ``nnx.Rngs`` or one of its streams, for noise and for random starts, which draw from ``params``.
      variable: The type of variables that train, by which trainers select them: ``nnx.LoRAParam`` for adapters.
      deterministic: Whether to replace noise by its mean.
      raw: A result of ``p.init(model)``, instead of a new start.

    Raises:
      TypeError: If ``model`` is not an ``nnx.Module``, or has modules that are not pytrees, ``p`` is not a chain,
        ``rngs`` are not those of nnx, ``variable`` is not a parameter's type, or ``raw`` has another class than
        ``model``.
      ValueError: If a start is random and there are no ``rngs``, or ``p.init`` refuses the model.

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
    ) -> None:
        """Wraps ``model``, with the raw tree of ``p`` in the place of its variables."""
        self.p = check_chain("rpx.nnx.Parametrized", model, p)
        check_model("rpx.nnx.Parametrized", model, nnx.Module, "nnx.Module")
        expect_pytree(model)
        check_variable(variable)
        start, noise = find_stream(rngs, "params"), find_stream(rngs, "noise")
        if raw is None:
            if p.random_start and start is None:
                raise needs_start_error(p, WITH_RNGS)
            key = start() if p.random_start else None
            raw = _map_parameters(lambda tree: p.init(tree, key), model)
        elif type(raw) is not type(model):
            raise TypeError(
                f"rpx.nnx.Parametrized takes a raw tree that is a {type(model).__name__}, as `p.init(model)` gives it, "
                f"but got {type(raw).__name__}. To replace only values, use `nnx.update(model.raw, "
                f"nnx.to_pure_dict(raw))`."
            )
        else:
            raw = _map_parameters(lambda tree: require_made_by(p, _to_model_types(tree)), raw)
            keep_changes(model, raw)  # what is no parameter is the model's
        self.rngs: Any = noise.fork() if noise is not None and (p.stochastic or p.advances) else nnx.data(None)
        self.deterministic = deterministic
        raw = _map_parameters(lambda tree: _with_types_by_training(tree, variable), raw)
        self.raw = nnx.data(raw)  # last, as attributes that are set afterwards are the model's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self._call_method("__call__", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model, or a method that makes the effective tree when it is called."""
        held, has_arrays = vars(self).get("raw"), lambda x: any(map(_is_parameter, variables_of(x)))
        return find_attribute(self, held, name, has_arrays=has_arrays, run=self._call_method, read=self._read)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the model where it has one of this name, as ``set_attributes`` does.

        Raises:
          ValueError: If it would be a part with parameters, as the chain starts them.
        """
        held = vars(self).get("raw")
        if held is None or name in vars(self) or name not in vars(held):
            super().__setattr__(name, value)
        elif any(map(_is_parameter, variables_of(value))):
            raise ValueError(
                f"rpx.nnx.Parametrized holds raw values, so {name!r} cannot become {type(value).__name__}, which holds "
                f"parameters. Change the plain model and wrap it: `model = model.fold()`, `model.{name} = ...`, "
                "`model = rpx.nnx.Parametrized(model, p)`."
            )
        else:
            setattr(held, name, value)

    def effective(self) -> Any:
        """The model of one draw, with the wrapped one's other variables, to call it several times with the same noise.

        Raises:
          ValueError: If the chain draws random numbers, and there is neither a stream nor ``deterministic``.
        """
        p = self.p.deterministic if self.deterministic else self.p
        if p.stochastic and self.rngs is None:
            raise needs_stream_error(p, "none", WITH_RNGS, "`model.deterministic = True`")
        key = self.rngs() if p.stochastic else None
        return _map_parameters(lambda tree: p.apply(_to_model_types(tree), key), self.raw)

    def fold(self) -> Any:
        """The plain model, without noise; it shares no variables with this one."""
        return nnx.clone(_map_parameters(lambda tree: self.p.fold(_to_model_types(tree)), self.raw))

    def update(self, grads: PyTree = None) -> None:
        """Advances the fixed values by one training step; once per step, as :meth:`Parametrization.update`.

        Args:
          grads: The gradient with respect to the plain model, for stages that read it.
        """
        key = None if self.rngs is None else self.rngs()
        new = _map_parameters(lambda tree: self.p.update(_to_model_types(tree), key, grads), self.raw)
        for variable, value in zip(variables_of(self.raw), variables_of(new), strict=True):
            if value is not variable and jax.tree.leaves(value):
                variable[...] = value[...]

    def set_view(self, *, deterministic: bool | None = None, **kwargs: Any) -> dict[str, Any]:
        """Sets what ``nnx.view`` asks for, and returns the rest."""
        if deterministic is not None:
            self.deterministic = deterministic
        return kwargs

    def _read(self) -> Any:
        """The effective model for attributes: setting its parameters raises an error, as it is made anew each time."""
        effective = self.effective()
        for variable in filter(_is_parameter, variables_of(effective)):
            variable.set_metadata(on_set_value=refuse_value)
        return effective

    def _call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the effective model, and keeps what it sets."""
        effective = self.effective()
        result = getattr(effective, name)(*args, **kwargs)
        keep_changes(effective, self.raw)
        return result


def _is_parameter(x: object) -> bool:
    """Whether a node is a parameter, raw or effective."""
    return isinstance(x, nnx.Param | Fixed)


_PLAIN = "plain"
"""The metadata that holds the type of a variable in the model."""


class _Hidden:
    """A leaf for a variable that is no parameter, or for one that stands at an earlier place too."""

    def __init__(self, at: int) -> None:
        self.at = at


def _is_place(x: object) -> bool:
    """Whether a node of a module is a parameter, raw or effective, or another variable."""
    return is_variable(x) or holds_markers(x) or isinstance(x, _Hidden)


def _value_of(variable: Any) -> Any:
    """What a variable holds: an array, or ``()`` at a place without one."""
    (value,) = jax.tree.leaves(variable, is_leaf=lambda x: x is not variable)
    return value


def _map_parameters(fun: Callable[[PyTree], PyTree], module: Any) -> Any:
    """``fun`` of the parameters of a module; other variables come out as the same objects.

    Where two modules share a parameter, they share the result.
    """
    nodes, treedef = jax.tree.flatten(module, is_leaf=_is_place)
    first: dict[Any, int] = {}
    places = [first.setdefault(tuple(map(id, variables_of(node))) or i, i) for i, node in enumerate(nodes)]

    def is_state(node: Any) -> bool:
        return is_variable(node) and not _is_parameter(node)

    kept = [place == i and not is_state(node) for i, (place, node) in enumerate(zip(places, nodes, strict=True))]
    shown = [node if keep else _Hidden(at) for node, keep, at in zip(nodes, kept, places, strict=True)]
    outs, outdef = jax.tree.flatten(fun(treedef.unflatten(shown)), is_leaf=_is_place)
    outs = [nodes[x.at] if isinstance(x, _Hidden) and is_state(nodes[x.at]) else x for x in outs]
    return outdef.unflatten([outs[x.at] if isinstance(x, _Hidden) else x for x in outs])


def _with_types_by_training(raw: PyTree, variable: type[Any]) -> PyTree:
    """A raw tree whose variables have types that say which of them train; :func:`_to_model_types` is the inverse."""

    def typed(node: Any, label: Any) -> Any:
        if not is_variable(node):
            return node
        kind = variable if "free" in jax.tree.leaves(label) else Fixed
        return kind.from_metadata(_value_of(node), {**node.get_metadata(), _PLAIN: type(node)})

    return jax.tree.map(typed, raw, param_labels(raw), is_leaf=is_variable)


def _to_model_types(raw: PyTree) -> PyTree:
    """The raw tree with variables of the model's own types."""

    def plain(node: Any) -> Any:
        if not is_variable(node):
            return node
        metadata = dict(node.get_metadata())
        own = nnx.Param if isinstance(node, Fixed) else type(node)  # as `nnx.update` forgets metadata
        return metadata.pop(_PLAIN, own).from_metadata(_value_of(node), metadata)

    return jax.tree.map(plain, raw, is_leaf=is_variable)
