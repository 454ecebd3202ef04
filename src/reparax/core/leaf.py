"""Defines the base classes of stages with a formula on one array: ``Perturbation`` and ``Reparametrization``.

A subclass defines formulas such as ``apply_leaf``, which see neither the rest of the tree nor stacked axes. Methods
whose names end in ``_at`` call the formulas for one array of the raw tree (a :class:`Site`), map them over stacked
arrays, and check what they return. ``call_once_per_type`` traces a formula once for all arrays of the same shape and
dtype, so that a model with a hundred equal layers does not trace the formula a hundred times.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.core import checks, config
from reparax.core.calls import CallName, can_take
from reparax.core.chain import Chain, Mean, Parametrization
from reparax.core.leafwise import Leafwise, read_values
from reparax.core.paths import has_symbols, type_of
from reparax.core.random import keys_of_stack
from reparax.core.raw import Flat, Leaf
from reparax.core.site import Site, site_of
from reparax.core.unchanged import mark_same, restore_same
from reparax.core.values import RawValues
from reparax.numerics.arithmetic import inlined
from reparax.numerics.terms import Term, record_terms, sum_terms


class Perturbation(Leafwise):
    """Base class for stages that return modified copies of arrays and have no raw values.

    A subclass defines ``apply_leaf(w, key) -> w``, and ``mean_leaf(w) -> w`` if the mean over all keys is not ``w``
    itself. A subclass may also set ``stochastic = False`` if it is not random (then ``key`` is None), ``min_ndim = 2``
    to exclude vectors, biases and scales by default, and ``straight_through = True`` if its gradient is not the
    gradient of its formula. Adding perturbations to a chain, or removing them, does not change the structure of the raw
    tree, so optimizer states and checkpoints still fit.

    Args:
      where: Which arrays to act on: a regular expression that must match the whole path, a predicate
        ``(path, array) -> bool`` that may use the array's shape and dtype, or :func:`all_but`. An expression with an
        ``@``, such as ``.*/@kronecker/b``, must match the whole path in the raw tree instead. Default: every floating
        or complex array that is a parameter and has at least ``min_ndim`` dimensions, which is 0 unless the stage sets
        another number. If ``min_ndim`` is two or more, arrays with the usual names of biases and scales are excluded:
        ``bias`` (alone or as a part of a name such as ``bias_n``), ``b``, ``scale``, ``offset``, ``gamma``, ``beta``,
        ``gain``.
      stacked: Axes along which independent arrays are stacked, such as the layers under a scan. The stage acts on each
        index separately, with separate noise. Give an axis by its index, counted from the front, or by name, and
        several axes as a tuple. Other arguments do not count the stacked axes: with ``stacked=0``, kernels of shape
        ``(layers, in, out)`` are treated as matrices whose ``axis=0`` is ``in``. Default: no stacked axes.

    A strength, such as a std, a rate, a factor, an alpha or a sparsity, can differ between arrays. One way is a dict of
    regular expressions, ``VarNoise({"out/.*": 0.05, ".*": 0.1})``. The first expression that matches the whole path
    determines the number, and the stage does not act on arrays that no expression matches. Another way is a function
    ``(path, array) -> number``, which may look at the array's shape and dtype. A field of your own stage takes such
    dicts and functions if you declare it with :func:`number_field`.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class SignFlip(rpx.Perturbation):
      ...     rate: float
      ...     def apply_leaf(self, w, key):
      ...         return jnp.where(jax.random.bernoulli(key, self.rate, w.shape), -w, w)
      ...     def mean_leaf(self, w):
      ...         return (1 - 2 * self.rate) * w
      >>> SignFlip(0.5).apply({"w": jnp.ones(4)}, jax.random.key(0))["w"]
      Array([ 1.,  1., -1.,  1.], dtype=float32)
      >>> SignFlip(0.25).fold({"w": jnp.ones(4)})["w"]
      Array([0.5, 0.5, 0.5, 0.5], dtype=float32)
    """

    stochastic: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises a TypeError if the ``apply_leaf`` of a subclass cannot take a key."""
        super().__init_subclass__(**kwargs)
        formula: Any = cls.__dict__.get("apply_leaf")
        if inspect.isfunction(formula) and not can_take(formula, 3, if_unknown=True):
            raise TypeError(
                f"{cls.__name__}.apply_leaf takes ({', '.join(_required_arguments(formula))}), but is called with "
                f"(self, w, key). Add the argument `key`, even if the stage is not random."
            )

    @abstractmethod
    def apply_leaf(self, w: Array, key: Array) -> Array:
        """Returns the effective array for ``w``, with the same shape and dtype as ``w``."""

    def mean_leaf(self, w: Array) -> Array:
        """Returns the mean of ``apply_leaf(w, key)`` over all keys. ``p.deterministic`` uses it in place of draws."""
        return w

    def sites(self, method: str, tree: Flat) -> list[Site]:
        """Returns a :class:`Site` for each selected array; the effective array replaces the array at the same path.

        Arrays are selected from ``tree`` in the same way before and after ``init``, because the stage has no raw
        values.
        """
        pairs = self._arrays_and_stages(method, tree)
        return [_site_in_place(stage, CallName(self, method, (leaf.path,)), leaf, ["w"]) for leaf, stage in pairs]

    def _apply_at(self, site: Site, values: RawValues, key: Array | None) -> dict[str, Array]:
        """Returns the effective array for ``w``, or its mean over all keys if the stage is random and no key is given.

        ``values`` is ``{"w": {"w": w}}``: the array is called ``"w"``, and its only value is the array itself.
        """
        w, is_mean = values["w"]["w"], self.stochastic and key is None
        if is_mean:
            effective = self._map_stacked(self.mean_leaf)(w)
        else:
            effective = self._map_stacked(self.apply_leaf)(w, keys_of_stack(key, w, self.stacked_axes))
        if not self.changes_type:
            checks.require_type("mean_leaf" if is_mean else "apply_leaf", effective, w)
        return {"w": effective}

    def _add_noise(self, w: Array, drawn: Array) -> Array:
        """Returns ``w`` with noise that the ``draw`` of the stage has drawn for the shape and dtype of ``w``.

        This method is for stages with ``draws_by_type``. A chain draws their noise for many arrays at once, and adds it
        to each array only where the array is read.
        """
        stage_class: Any = type(self)
        return call_once_per_type(stage_class.perturb, self, w, drawn, inline=True)

    @property
    def deterministic(self) -> Parametrization:
        """The stage itself if it is not random, an empty chain if its mean changes nothing, and otherwise its mean."""
        if not self.stochastic:
            return self
        return Chain() if type(self).mean_leaf is Perturbation.mean_leaf else Mean(self)


class Reparametrization(Leafwise):
    """Base class for stages that replace selected arrays with named raw values, under a key such as ``"@lora"``.

    PyTorch calls such a stage a parametrization: ``parametrize.register_parametrization`` takes a module whose
    ``right_inverse`` corresponds to ``init_leaf``, and whose ``forward`` corresponds to ``apply_leaf``.

    A subclass defines ``init_leaf(w) -> {name: value}`` and ``apply_leaf(values) -> w``, with
    ``apply_leaf(init_leaf(w)) == w`` for every ``w`` in the image, the set of arrays that ``apply_leaf`` can return. If
    the initial values are random, ``init_leaf(w, key)`` takes a key too. Instead of ``apply_leaf``, a subclass may
    define ``terms_leaf(values)``, which returns a list of :class:`Term` whose sum is the array. A subclass may also set
    ``raw_values``, which declares each raw value:
    ``{"v": rpx.stage.main(aligned=True), "g": rpx.stage.aux(), "mask": rpx.stage.fixed()}``. Earlier stages of a chain
    act on main values, under the path of the parameter. Main and auxiliary values are trainable; fixed values are not.
    Default: all values are main.

    With ``stochastic = True``, the effective array is random: the formula is ``apply_leaf(values, key)``, and
    ``mean_leaf(values)`` is its mean over all keys, which ``p.deterministic`` uses instead. ``init`` then inverts the
    mean. A subclass may define ``penalty_leaf(values)``, which is added to ``p.penalty(raw)``, and if the formula is a
    bijection, ``log_det_leaf(values)``, which is added to ``p.log_det(raw)``.

    Args:
      where: Which arrays to act on, as for :class:`Perturbation`, with the same default.
      stacked: Axes along which independent arrays are stacked, as for :class:`Perturbation`. The stacked axes of each
        raw value are at the same positions as in the array, or as close as possible if it has too few axes.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class LogScale(rpx.Reparametrization):
      ...     def init_leaf(self, w):
      ...         return {"log": jnp.log(w)}
      ...     def apply_leaf(self, values):
      ...         return jnp.exp(values["log"])
      >>> LogScale().init({"w": jnp.ones(2)})
      {'w': {'@log_scale': {'log': Array([0., 0.], dtype=float32)}}}
      >>> layers = {"kernel": jnp.ones((12, 8, 4)), "bias": jnp.zeros((12, 4))}
      >>> jax.tree.map(jnp.shape, rpx.WeightNorm(stacked=0).init(layers))
      {'bias': (12, 4), 'kernel': {'@weight_norm': {'g': (12, 1, 4), 'v': (12, 8, 4)}}}
    """

    overcomplete: ClassVar[bool] = False
    """Whether some entries of an effective array follow from the others, although the array has as many raw values as
    entries. The probabilities of ``Simplex``, for example, add up to 1, so the last one follows from the others."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Checks the signatures of the formulas, and defines ``apply_leaf`` if the class has only ``terms_leaf``."""
        super().__init_subclass__(**kwargs)
        if "terms_leaf" in vars(cls) and cls.apply_leaf is Reparametrization.apply_leaf:
            cls.apply_leaf = _apply_terms
        _require_signatures(cls)

    def init_leaf(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Returns raw values from which ``apply_leaf`` computes ``w``, or else the nearest array that it can compute.

        If the initial values are random, this method takes a ``key`` after ``w``, and ``init`` then requires a key.

        Raises:
          TypeError: If the class does not define ``init_leaf``.
        """
        raise TypeError(f"{type(self).__name__} defines no init_leaf(w). Define it to return a dict of raw values.")

    @abstractmethod
    def apply_leaf(self, *args: Any, **kwargs: Any) -> Array:
        """Returns the effective array for a dict of all raw values and, if the stage is stochastic, a random key.

        If a class defines only ``terms_leaf``, this method returns the sum of its terms.
        """

    def terms_leaf(self, *args: Any, **kwargs: Any) -> Sequence[Term]:
        """Returns the terms whose sum is the effective array; :func:`factored` uses them without forming that sum.

        ``terms_leaf`` takes the same arguments as ``apply_leaf``: ``(values)`` or ``(values, key)``. If ``apply_leaf``
        only multiplies and adds matrices, vectors and numbers, you do not need ``terms_leaf``, because reparax then
        finds the terms itself.

        Raises:
          TypeError: If the class does not define ``terms_leaf``.
        """
        raise TypeError(
            f"{type(self).__name__} defines no terms_leaf(values). Define it to return a list of `rpx.stage.Term`, or "
            f"call apply_leaf."
        )

    def mean_leaf(self, values: dict[str, Array]) -> Array:
        """Returns the mean of ``apply_leaf(values, key)`` over all keys, if the stage is stochastic.

        Raises:
          TypeError: If a stochastic class does not define ``mean_leaf``.
        """
        raise TypeError(
            f"{type(self).__name__} is stochastic, but defines no mean_leaf(values). Define it to return the mean of "
            f"apply_leaf(values, key) over all keys."
        )

    def penalty_leaf(self, values: dict[str, Array]) -> Array:
        """Returns a scalar penalty for the raw values of one array, such as a KL divergence from a prior."""
        return jnp.zeros(())

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        r"""Returns the logarithm of the absolute determinant of the Jacobian of a bijective ``apply_leaf``.

        The result is a scalar. A stage that defines this method supports :meth:`Parametrization.log_det`, which
        samplers need. If some entries of an array follow from the others, as in a symmetric matrix, leave these
        dependent entries out of the Jacobian. In that case, no later stage of the chain can have a log-determinant.

        Example:
          This stage represents the Cholesky factor L of a correlation matrix. The rows of L have length 1, so only the
          entries below its diagonal are free. Each free entry is a share, from -1 to 1, of the length that remains
          after the entries to its left:

          >>> import jax, jax.numpy as jnp, reparax as rpx
          >>> class CorrelationFactor(rpx.Reparametrization):
          ...     min_ndim = 2
          ...     dtypes = jnp.floating
          ...     def init_leaf(self, w):
          ...         below = jnp.tril_indices(len(w), -1)
          ...         left = jnp.sqrt(1 - jnp.cumsum(w**2, 1) + w**2)
          ...         return {"x": jnp.arctanh((w / left)[below])}
          ...     def shares_and_left(self, x):
          ...         n = int((2 * x.size) ** 0.5) + 1
          ...         shares = jnp.zeros((n, n), x.dtype).at[jnp.tril_indices(n, -1)].set(jnp.tanh(x))
          ...         left = jnp.cumprod(jnp.sqrt(1 - shares**2), 1)
          ...         return shares, jnp.pad(left, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
          ...     def apply_leaf(self, values):
          ...         shares, left = self.shares_and_left(values["x"])
          ...         return (shares + jnp.eye(len(left), dtype=left.dtype)) * left
          ...     def log_det_leaf(self, values):
          ...         shares, left = self.shares_and_left(values["x"])
          ...         below = jnp.tril_indices(len(left), -1)
          ...         return jnp.sum(jnp.log(left[below]) + jnp.log1p(-(shares[below] ** 2)))
          >>> p = CorrelationFactor(where="corr")
          >>> factor = jnp.linalg.cholesky(jnp.array([[1.0, 0.5], [0.5, 1.0]]))
          >>> raw = p.init({"corr": factor})
          >>> bool(jnp.allclose(p.apply(raw)["corr"], factor))
          True
          >>> bool(jnp.allclose(p.log_det(raw), jnp.log(0.75)))  # the derivative of tanh where it is 0.5
          True
        """
        return jnp.zeros(())

    def update_leaf(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Returns the fixed values that change in a training step, given the raw values as earlier stages compute them.

        A value that does not change may be left out or returned as the same object. The new values must keep their
        shapes and dtypes. The result may include free values only if the class sets ``moves_weights = True``.

        The signature is ``update_leaf(values)``. It may also have the arguments ``grad``, the gradient of the loss with
        respect to the effective array, and ``key``: ``update_leaf(values, grad, key)``. ``update`` calls such a formula
        only if its own caller passes the gradients or the key that the formula takes.
        """
        return {}

    def update_base_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        """Returns raw values that give the same effective array, with that array as their new base.

        The base is the fixed value relative to which the free values are measured, as in :class:`Orthogonal`. The new
        values must keep their shapes and dtypes. Values that do not change may be left out.
        """
        return values

    @property
    def deterministic(self) -> Parametrization:
        """The stage with ``mean_leaf`` in place of ``apply_leaf``, or the stage itself if it is not random."""
        return Mean(self) if self.stochastic else self

    @property
    def _in_place(self) -> bool:
        """Whether the only raw value is the array itself, stored at its own path instead of in a marker dict.

        If so, the structure of the tree is the same with and without the stage.
        """
        return False

    @property
    def update_reads(self) -> tuple[str, ...]:
        """The optional arguments that ``update_leaf`` takes: ``"grad"``, ``"key"``, both or none."""
        return tuple(name for name in inspect.signature(self.update_leaf).parameters if name in ("grad", "key"))

    @property
    def _init_takes_key(self) -> bool:
        """Whether ``init_leaf`` has an argument ``key``. If so and ``random_init`` is False, the key is optional."""
        return _init_leaf_takes_key(type(self))

    def _defines(self, verb: str) -> bool:
        """Returns whether the class overrides the formula for ``verb``, such as ``update_leaf`` for ``"update"``."""
        return getattr(type(self), f"{verb}_leaf") is not getattr(Reparametrization, f"{verb}_leaf")

    def sites(self, method: str, tree: Flat) -> list[Site]:
        """Returns a :class:`Site` for each selected array, with the numbers and axes of the stage for that array.

        In ``init``, the site holds the key path of the array itself. In later calls, it holds those of the raw values.
        """
        who, call = CallName(self, method), _formula_caller(self)
        if method == "init" or self._in_place:  # The leaves are arrays, not marker dicts.
            pairs = self._arrays_and_stages(method, tree)
            for leaf, stage in pairs:
                self._require_readable_stack(stage, leaf)
        else:
            pairs = self._nodes_and_stages(who, tree)
        return [self._site_at(stage, who.at(leaf.path), leaf, call) for leaf, stage in pairs]

    def _require_readable_stack(self, stage: Self, leaf: Leaf) -> None:
        """Raises an error if later calls, which see only the raw values, could not infer the stacked axes from them.

        In ``init``, the stacked axes come from the layer of the array, and ``stage``, the stage for that array, holds
        their indices. The shape that is inferred from the types of the initial values must equal the shape of the
        array.

        Nothing is checked if the raw value is the array itself, if the user gave the stacked axes, or if the axes of
        the array do not come from a layer.
        """
        if self._in_place or stage.stacked == self.stacked or not leaf.axes.are_of_layer:
            return
        with checks.locate_errors(CallName(self, "init", (leaf.path,))):
            w = type_of(leaf.content)
            with suppress(jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # `init_leaf` may not be traceable.
                found = read_values(self, leaf, jax.eval_shape(lambda w: _initial_values(stage, w, None), w)).effective
                if found.shape != w.shape and not self.changes_type:
                    raise ValueError(
                        f"expected raw values that determine the stacked axes, but those of an array of "
                        f"shape {w.shape} would be read as those of shape {found.shape}. Write "
                        f"{replace(self, stacked=stage.stacked)!r} to set the stacked axes."
                    )

    def _site_at(self, stage: Self, who: CallName, leaf: Leaf, call: Any) -> Site:
        """Returns the :class:`Site` of one array. ``stage`` is the stage for it, and ``call`` calls its formulas."""
        if self._in_place:
            return _site_in_place(stage, who, leaf, self.raw_values)
        types = None if leaf.reading is None or self.changes_type else {"w": leaf.array}
        return site_of(stage, who, {"w": leaf}, draw_path=leaf.draw_path, call=call, types=types)

    def _array_for_type(self, values: Mapping[str, Array]) -> Array:
        """Returns the effective array for its raw values, or its mean over all keys if the stage is random."""
        return call_once_per_type(_array_or_mean, self, values)

    def _require_initial_types(self, types: Mapping[str, Any], effective: Any) -> None:
        """Raises an error unless ``types`` have the names and shapes of raw values that ``init(effective)`` gives.

        Shapes are not compared if ``init_leaf`` cannot be traced, or if the stage may change the type of the array.
        """
        super()._require_initial_types(types, effective)
        if not self.changes_type and not has_symbols(types.values()):
            with suppress(jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # `init_leaf` may not be traceable.
                expected = jax.eval_shape(lambda w: call_once_per_type(_initial_values, self, w, None), effective)
                checks.require_fit(types, expected)

    def _init_at(self, site: Site, arrays: Mapping[str, Array], key: Array | None) -> RawValues:
        """Returns the initial raw values of the array ``arrays["w"]``, as in ``{"w": {"g": ..., "v": ...}}``."""
        w = arrays["w"]
        # The stages of this package are pure, so all arrays of a type share one compiled program. A stage of another
        # package may depend on the entries of the array.
        is_of_package = config.is_of_package(type(self))
        call = partial(_call_jitted, _jitted) if is_of_package else site.call
        return {"w": call(_initial_values, self, w, key)}

    def _check_init(self, values: RawValues, arrays: Mapping[str, Array]) -> None:
        """Raises an error unless the formula turns initial raw values into an array of the type of ``arrays["w"]``.

        The formula is only traced. For a random stage, this formula is ``mean_leaf``.
        """
        types = {name: type_of(x) for name, x in values["w"].items()}
        effective = jax.eval_shape(lambda values: self._array_for_type(values), types)
        if not self.changes_type:
            checks.require_type("mean_leaf" if self.stochastic else "apply_leaf", effective, arrays["w"])

    def _apply_at(self, site: Site, values: RawValues, key: Array | None) -> dict[str, Array]:
        """Returns the effective array for the raw values: a random draw if a key is given, and otherwise the mean."""
        if self._in_place:
            return {"w": _array_or_mean(self, values["w"])}
        if key is None:
            return {"w": site.call(_array_or_mean, self, values["w"])}
        return {"w": site.call(_random_array, self, values["w"], key)}

    def _update_at(self, site: Site, values: RawValues, grads: Mapping[str, Any], key: Array | None) -> RawValues:
        """Returns the new raw values from ``update_leaf``, as in ``{"w": {"mask": ...}}``.

        ``update_leaf`` gets the gradient or the key only if it has an argument for it, and callers make sure to pass
        it. It also gets a copy of the dict of values, because a user-defined formula may modify its argument.
        """
        all_arguments = {"grad": grads.get("w"), "key": key}
        arguments = {name: all_arguments[name] for name in self.update_reads}

        def update_one(values_of_one: dict[str, Array], arguments_of_one: dict[str, Any]) -> dict[str, Array]:
            new_values = self.update_leaf(dict(values_of_one), **arguments_of_one)
            checks.require_update("update_leaf", self, values_of_one, new_values)
            return new_values

        return {"w": self._map_stacked(update_one)(values["w"], arguments)}

    def _update_base_at(self, site: Site, values: RawValues) -> RawValues:
        """Returns the new raw values from ``update_base_leaf``, which makes the current array their base."""

        def rebase_one(values_of_one: dict[str, Array]) -> dict[str, Array]:
            new_values = self.update_base_leaf(dict(values_of_one))
            checks.require_kept("update_base_leaf", self, values_of_one, new_values)
            return new_values

        return {"w": self._map_stacked(rebase_one)(values["w"])}

    def _number_at(self, site: Site, formula: str, values: RawValues) -> Array:
        """Returns the result of ``penalty_leaf`` or ``log_det_leaf``; ``formula`` is ``"penalty"`` or ``"log_det"``."""
        return self._checked_number(f"{formula}_leaf", values["w"])


def _site_in_place(stage: Any, who: CallName, leaf: Leaf, value_names: Iterable[str]) -> Site:
    """Returns the :class:`Site` of a stage whose named raw values are all the array itself, at its own path."""
    values = {"w": dict.fromkeys(value_names, leaf.place)}
    return Site(stage=stage, who=who, arrays={"w": leaf.place}, values=values, draw_path=leaf.draw_path)


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's required positional arguments, without ``*args`` and keyword-only ones."""
    parameters = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in positional and parameter.default is inspect.Parameter.empty
    ]


def _arguments_after_values(cls: type[Any], method: str) -> list[str]:
    """Returns the names of the required arguments that a method takes after ``self`` and the values.

    For ``def apply_leaf(self, values, key)``, the result is ``["key"]``. The inspected signature of a static method or
    a class method has no ``self``.
    """
    is_bound = isinstance(inspect.getattr_static(cls, method), staticmethod | classmethod)
    return _required_arguments(getattr(cls, method))[1 if is_bound else 2 :]


def _init_leaf_takes_key(cls: type[Any]) -> bool:
    """Returns whether ``init_leaf`` takes a key, because the initial values are random."""
    return "key" in inspect.signature(cls.init_leaf).parameters


def _require_signatures(cls: type[Any]) -> None:
    """Raises a TypeError if a formula of a class requires an argument that it would never get.

    The check runs when the class is defined, so that a mistake is reported there and not during tracing.
    """
    if unknown := [name for name in _arguments_after_values(cls, "update_leaf") if name not in ("grad", "key")]:
        raise TypeError(
            f"{cls.__name__}.update_leaf takes {', '.join(unknown)} after the values, but only `grad` and `key` are "
            f"possible. Rename or remove the other arguments."
        )
    if (further := _arguments_after_values(cls, "apply_leaf")) and not cls.stochastic:
        raise TypeError(
            f"{cls.__name__}.apply_leaf takes {', '.join(further)} after the values, but the class is not "
            f"stochastic. Remove these arguments, or for a random array, set `stochastic = True` in the class and "
            f"define mean_leaf(values)."
        )
    init_leaf: Any = cls.__dict__.get("init_leaf")  # An inherited method was checked when its own class was defined.
    if inspect.isfunction(init_leaf) and len(_required_arguments(init_leaf)) > 2 + _init_leaf_takes_key(cls):  # self, w
        raise TypeError(
            f"{cls.__name__}.init_leaf takes ({', '.join(_required_arguments(init_leaf))}), but is called with (self, "
            f"w), or with (self, w, key) if it takes a `key` for random initial values. Remove all other arguments."
        )


def _declares_terms(cls: type[Any]) -> bool:
    """Returns whether a class has both a handwritten ``apply_leaf`` and a ``terms_leaf`` that belongs to it.

    If so, the terms have to be recorded together with the result of ``apply_leaf``. Besides classes without
    ``terms_leaf``, the result is False in two cases:

    - A subclass overrides only ``apply_leaf``, so the inherited terms no longer add up to the array.
    - ``apply_leaf`` computes the sum of ``terms_leaf``, so the terms can be read from its program.
    """
    class_of_terms = _defining_class(cls, "terms_leaf")
    class_of_formula = _defining_class(cls, "apply_leaf")
    if class_of_terms is Reparametrization or class_of_formula.apply_leaf is _apply_terms:
        return False
    return issubclass(class_of_terms, class_of_formula)


def _defining_class(cls: type[Any], method: str) -> type[Any]:
    """Returns the class that defines a method of ``cls``: ``cls`` itself, or the base class with the definition."""
    return next(base for base in cls.__mro__ if method in vars(base))


def _apply_terms(self: Reparametrization, *args: Any, **kwargs: Any) -> Array:
    """Returns the sum of the terms. A class that defines only ``terms_leaf`` gets this function as ``apply_leaf``."""
    return sum_terms(self.terms_leaf(*args, **kwargs))


# The functions below call formulas, and map them over stacked arrays.


def call_once_per_type(function: Callable[..., Any], stage: Any, *arrays: Any, inline: bool = False) -> Any:
    """Returns ``function(stage, *arrays)``; under tracing, arrays of the same types share one jitted function.

    Stacked arrays use the jitted function outside of tracing too, because ``jax.vmap`` itself traces the formula, and
    functions that are jitted inside ``jax.vmap`` would be compiled again in each call. Formulas of other packages are
    called directly, because they may depend on more than their arguments. With ``inline``, the operations become part
    of the surrounding program instead of a jitted function. Set ``inline`` only for a few operations on whole arrays.
    """
    if config.is_of_package(type(stage)) and ((stage.stacked_axes and not inline) or _is_traced(arrays)):
        return _call_jitted(_inlined if inline else _jitted, function, stage, *arrays)
    return function(stage, *arrays)


def _formula_caller(stage: Any) -> Callable[..., Any]:
    """Returns the function that calls the formulas of a stage within one call of a chain, tracing each once per type.

    A formula of this package is traced once per type of array. A formula of another package is traced again in each
    call of the chain, because something that it reads, such as a global function, may have changed in the meantime. The
    operations of such a formula are inlined, because a jitted function would be compiled again in each eager call.
    """
    if config.is_of_package(type(stage)):
        return call_once_per_type
    jitted = inlined(partial(_call_marked), static_argnums=(0, 1, 2))  # The new `partial` object has its own cache.

    def call_once_per_call(function: Callable[..., Any], stage: Any, *arrays: Any) -> Any:
        """Returns ``function(stage, *arrays)``, where the function is traced once for all arrays of the same type."""
        return _call_jitted(jitted, function, stage, *arrays) if _is_traced(arrays) else function(stage, *arrays)

    return call_once_per_call


def _is_traced(arrays: Any) -> bool:
    """Returns whether any array in a pytree of arrays is a tracer."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays))


def _call_jitted(jitted: Any, function: Callable[..., Any], stage: Any, *arrays: Any) -> Any:
    """Returns ``function(stage, *arrays)``, computed by ``jitted``, which is traced once for equal stages and types.

    ``jitted`` is a transformed :func:`_call_marked`. An array that the function returns unchanged stays the same
    object.
    """
    if stage._exact_text is None:  # Without an exact text of the fields, no two stages are known to be equal.
        return function(stage, *arrays)
    return restore_same(jitted(function, stage, stage._exact_text, *arrays), *arrays)


def _call_marked(function: Callable[..., Any], stage: Any, text: str, *arrays: Any) -> Any:
    """Returns ``function(stage, *arrays)``, where arrays that ``function`` returns unchanged are marked.

    When ``_call_marked`` is jitted, ``text`` is a static argument. The text distinguishes stages that compare equal but
    are not the same, such as stages with the rates ``1`` and ``True``.
    """
    return mark_same(partial(function, stage), *arrays)


_jitted = jax.jit(_call_marked, static_argnums=(0, 1, 2))
_inlined = inlined(_call_marked, static_argnums=(0, 1, 2))


def _apply_formula(stage: Any, *args: Any) -> Array:
    """Returns ``apply_leaf(*args)``, and records the terms of this sum if the class declares them."""
    has_terms = _declares_terms(type(stage))
    return record_terms(stage.apply_leaf, stage.terms_leaf, *args) if has_terms else stage.apply_leaf(*args)


def _initial_values(stage: Any, w: Array, key: Array | None) -> dict[str, Array]:
    """Returns the initial raw values of an array by name; ``stage`` must hold the numbers and axes for that array.

    If only the types of the values matter, ``key`` may be None even if the values are random.
    """
    init = stage._map_stacked(stage.init_leaf)
    if stage._init_takes_key:
        values = init(w, keys_of_stack(jax.random.key(0) if key is None else key, w, stage.stacked_axes))
    else:
        values = init(w)
    checks.require_named_arrays("init_leaf", values, stage.raw_values)
    return values


def _array_or_mean(stage: Any, values: Mapping[str, Array]) -> Array:
    """Returns the effective array for a dict of raw values, or its mean over all keys if the stage is random."""
    formula = stage.mean_leaf if stage.stochastic else partial(_apply_formula, stage)
    return stage._map_stacked(formula)(dict(values))


def _random_array(stage: Any, values: Mapping[str, Array], key: Array) -> Array:
    """Returns a random effective array for raw values and a key; raises an error unless it has the type of the mean.

    Each of the stacked arrays gets its own key. The number of stacked arrays follows from the type of the mean.
    """
    like = jax.eval_shape(lambda values: _array_or_mean(stage, values), dict(values))
    keys = keys_of_stack(key, like, stage.stacked_axes)
    effective = stage._map_stacked(partial(_apply_formula, stage))(dict(values), keys)
    checks.require_type("apply_leaf", effective, like)
    return effective
