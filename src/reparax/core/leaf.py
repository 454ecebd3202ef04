"""The base classes of stages with a formula on one array."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import (
    AXIS_CHECKS,
    EACH,
    Axes,
    check_front_axes,
    count_from_front,
    has_names,
    last_to_number,
    why_axes_do_not_fit,
)
from reparax.core.chain import Chain, Mean, Parametrization
from reparax.core.fields import AxesByPath, ByArray, ByPath, argument
from reparax.core.plan import Planner
from reparax.core.planners import OnArrays, OnArraysInPlace, Selection
from reparax.core.usage import takes
from reparax.core.where import Where, check_where
from reparax.numerics.terms import Term, sum_terms


class Leafwise(Parametrization):
    """A stage that acts on arrays one by one."""

    where: Where = argument(check_where, default=None, kw_only=True)
    stacked: Axes = argument(AxesByPath(check_front_axes), default=(), kw_only=True)

    min_ndim: ClassVar[int] = 0
    """The fewest dimensions of arrays that the stage acts on by default. If this is two or more, the default also
    excludes biases and scales by name, whatever their dimensions."""
    tables: ClassVar[bool] = True
    """Whether the default includes tables of embeddings, by name."""
    dtypes: ClassVar[Any] = jnp.inexact
    """The dtypes that the stage takes."""
    _last_of_any: ClassVar[bool] = False
    """Whether the default of an axis is the last one of arrays of any number of axes, not of matrices alone."""
    _takes_base: ClassVar[bool] = False
    """Whether the stage acts on the base of an adapter instead of on the adapter."""

    _planner: ClassVar[type[Planner]] = Selection

    _axis_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that hold axes. Users may give these by name or by path; in a formula they are numbers."""
    by_roles: ClassVar[Any] = {}
    """For fields of axes that nobody set, which axes of the network they are: ``{"axis": "outputs"}``."""
    transposes: ClassVar[bool] = False
    """Whether a matrix and its transposed one mean the same for the stage."""
    entrywise: ClassVar[Any] = False
    """Whether each entry of an array is computed of its own raw values, so that stacked axes do not matter."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._checks = {
            name: AxesByPath(check) if check in AXIS_CHECKS else check for name, check in cls._checks.items()
        }
        cls._axis_fields = tuple(
            name for name, check in cls._checks.items() if isinstance(check, AxesByPath) and name != "stacked"
        )

    def default(self, w: Array) -> bool:
        """Whether the stage acts on ``w``, by its shape and dtype, if no ``where`` is given."""
        return jnp.issubdtype(w.dtype, self.dtypes) and w.ndim >= self.min_ndim

    def refuse_leaf(self, w: Array) -> str | None:
        """Why the formula cannot take ``w`` (expected, got; what to do), or None if it can."""
        del w
        return None

    def _why_refused(self, w: Array) -> str | None:
        """Why the stage cannot act on ``w``, whose dtype it takes, or None if it can."""
        return self._axes_error(w) or self.refuse_leaf(w)

    def _dtype_error(self, w: Array) -> str | None:
        """What is wrong with the dtype of ``w``, or None."""
        if jnp.issubdtype(w.dtype, self.dtypes):
            return None
        expected = "floating or complex" if self.dtypes is jnp.inexact else self.dtypes.__name__
        return f"expected a {expected} array, got {w.dtype}. Leave it out with `where`."

    def _axes_error(self, w: Array) -> str | None:
        """What is wrong with the axes of the fields for ``w``, or None."""
        axes_of_field = {name: getattr(self, name) for name in self._axis_fields}
        axes_by_number = {
            name: last_to_number(axes) if self._last_of_any else axes for name, axes in axes_of_field.items()
        }
        reasons = (why_axes_do_not_fit(axes, w, name) for name, axes in axes_by_number.items())
        return next(filter(None, reasons), None)

    def axes_in_use(self, w: Array) -> dict[str, tuple[tuple[int, ...], str]]:
        """For each field of axes with a meaning in networks, its axes of ``w``, from the front, and that meaning."""
        axes_and_word = {name: (getattr(self, name), word) for name, word in self.by_roles.items()}
        return {
            name: (count_from_front(axes, w), word)
            for name, (axes, word) in axes_and_word.items()
            if axes not in (None, EACH)
        }

    def _on_one(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """The formula as one on an array without stacked axes, and on its raw values."""
        return formula

    @property
    def _alone(self) -> Self:
        """This stage for what ``_on_one`` gives the formula."""
        return self

    @property
    def _varied(self) -> dict[str, ByPath | ByArray]:
        """The fields whose number differs from array to array."""
        field_values = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in self._all_axis_fields
        }
        return {name: value for name, value in field_values.items() if isinstance(value, ByPath | ByArray)}

    @property
    def _by_path(self) -> dict[str, ByPath]:
        """The fields of axes that differ from array to array."""
        axes_of_field = {name: getattr(self, name) for name in self._all_axis_fields}
        return {name: value for name, value in axes_of_field.items() if isinstance(value, ByPath)}

    @property
    def _all_axis_fields(self) -> tuple[str, ...]:
        """The names of the fields of axes, with that of stacked ones."""
        return (*self._axis_fields, "stacked")

    def for_array(self, path: str, w: Any) -> Self:
        """This stage with the numbers for one array; functions of the array get its shape and dtype."""
        if not (varying_fields := self._varied):
            return self
        like = None if w is None else jax.ShapeDtypeStruct(w.shape, w.dtype)
        return replace(self, **{name: value.at(path, like) for name, value in varying_fields.items()})

    def at_path(self, path: str) -> Self | None:
        """This stage with the axes for one array; None if they are given by path, but not for this one."""
        if not (by_path := self._by_path):
            return self
        if not all(axes.matching(path) for axes in by_path.values()):
            return None
        return replace(self, **{name: axes.at(path, None) for name, axes in by_path.items()})

    @property
    def _named_axes(self) -> dict[str, Any]:
        """The fields that give axes by name."""
        axes = {name: getattr(self, name) for name in self._axis_fields}
        return {name: field_axes for name, field_axes in axes.items() if has_names(field_axes)}

    @property
    def _asks_names(self) -> bool:
        """Whether any axis is given by name."""
        axes_of_fields = [getattr(self, name) for name in self._all_axis_fields]
        return any(
            map(has_names, (axes for x in axes_of_fields for axes in (x.numbers if isinstance(x, ByPath) else (x,))))
        )


class Perturbation(Leafwise):
    """A stage that changes arrays in place and leaves the raw tree alone.

    A subclass defines ``apply_leaf(w, key) -> w``, and ``mean_leaf(w) -> w`` if the mean over all keys is not ``w``
    itself. It may set ``stochastic = False`` if it is not random (then ``key`` is None), ``min_ndim = 2`` to exclude
    vectors, biases and scales by default, and ``straight_through = True`` if its gradient is not that of its formula. A
    chain with perturbations and the same chain without them have the same raw structure, so they can share optimizer
    states and checkpoints.

    Args:
      where: Which arrays to act on: a regular expression that the whole path must match, or a predicate ``(path, array)
        -> bool``, which may look at the array's shape and dtype, or :func:`all_but`. An expression with an ``@``, such
        as ``.*/@kronecker/b``, must match the whole path in the raw tree instead. Default: every floating or complex
        array that is a parameter and has at least ``min_ndim`` dimensions, which is 0 unless the stage sets another
        number. With two or more, arrays with the usual names of biases and scales are excluded: ``bias`` (alone or as a
        part of a name such as ``bias_n``), ``b``, ``scale``, ``offset``, ``gamma``, ``beta``.
      stacked: Axes of independent arrays, such as the layers under a scan: the stage acts on each index separately,
        with separate noise. By number, counted from the front, or by name; several as a tuple. Other arguments do not
        count these axes: with ``stacked=0``, kernels of shape ``(layers, in, out)`` count as matrices whose ``axis=0``
        is ``in``. Default: none.

    If a stage takes a strength, such as a std, a rate, a factor, an alpha or a sparsity, you can give one for each
    array: a dict of regular expressions that must match the whole path, ``VarNoise({"decoder/.*": 0.075})``, where the
    stage does not act on arrays that no expression matches; or a function ``(path, array) -> number``, which may look
    at the array's shape and dtype. A field of your own stage takes these if you declare it with :func:`per_array`.

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
    _planner: ClassVar[type[Planner]] = OnArraysInPlace

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        formula: Any = cls.__dict__.get("apply_leaf")
        if inspect.isfunction(formula) and not takes(formula, 3, unsure=True):
            raise TypeError(
                f"{cls.__name__}.apply_leaf takes {', '.join(_required_arguments(formula))}, but is called with (self, "
                f"w, key). Take a key, even if the stage is not random."
            )

    @abstractmethod
    def apply_leaf(self, w: Array, key: Array) -> Array:
        """The effective array of ``w``, of the same shape and dtype."""

    def mean_leaf(self, w: Array) -> Array:
        """The mean of ``apply_leaf(w, key)`` over all keys, which ``p.deterministic`` uses instead."""
        return w

    @property
    def deterministic(self) -> Parametrization:
        if not self.stochastic:
            return self
        return Chain() if type(self).mean_leaf is Perturbation.mean_leaf else Mean(self)


class Reparametrization(Leafwise):
    """A stage that replaces each selected array by named raw values, under the marker ``@kind``.

    It is what torch calls a parametrization: ``parametrize.register_parametrization`` of a module with
    ``right_inverse`` as ``init_leaf`` and ``forward`` as ``apply_leaf``.

    A subclass defines ``init_leaf(w) -> {name: value}`` and ``apply_leaf(values) -> w``, with
    ``apply_leaf(init_leaf(w)) == w`` for every ``w`` in the image, the arrays that ``apply_leaf`` can return. Instead
    of ``apply_leaf`` it may define ``terms_leaf(values)``, a list of :class:`Term` whose sum is the array. It may set
    one more attribute:

    - ``raw_values``: what each raw value is,
      ``{"v": rpx.stage.main(aligned=True), "g": rpx.stage.aux(), "mask": rpx.stage.fixed()}``. Earlier stages act on
      main values, under the parameter's own path; auxiliary values train too, fixed ones do not. Default: all values
      are main;

    With ``stochastic = True`` the effective array is random: the formula is ``apply_leaf(values, key)``, and
    ``mean_leaf(values)`` is its mean over all keys, which ``p.deterministic`` uses instead; ``init`` inverts the
    mean. The stage adds ``penalty_leaf(values)`` to ``p.penalty(raw)``, and ``log_det_leaf(values)``, for a bijection,
    to ``p.log_det(raw)``.

    Args:
      where: As for :class:`Perturbation`, with the same default.
      stacked: As for :class:`Perturbation`. The stacked axes of each raw value are at the same positions as in the
        array; if the raw value has too few axes, as near to these as possible.

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
    """Whether entries of an array follow from others though there are as many raw values, as the probabilities of
    ``Simplex``, which add up to 1."""

    _planner: ClassVar[type[Planner]] = OnArrays
    _update_reads: ClassVar[tuple[str, ...]] = ()
    """What ``update_leaf`` takes after the values: ``"grad"``, ``"key"``, both or none."""
    _declares_terms: ClassVar[bool] = False
    """Whether ``apply_leaf`` tells its terms, which the class declares beside it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "terms_leaf" in vars(cls) and cls.apply_leaf is Reparametrization.apply_leaf:
            cls.apply_leaf = _apply_terms
        formula, terms = (_class_that_writes(cls, name) for name in ("apply_leaf", "terms_leaf"))
        # If a subclass redefines apply_leaf only, the inherited terms do not fit it.
        terms_are_stale = terms is Reparametrization or not issubclass(terms, formula)
        cls._declares_terms = not terms_are_stale and formula.apply_leaf is not _apply_terms
        cls._update_reads = _arguments_of_update(cls)
        if (further := _arguments_after_values(cls, "apply_leaf")) and not cls.stochastic:
            raise TypeError(
                f"{cls.__name__}.apply_leaf takes {', '.join(further)} after the values. If the array is random, set "
                f"`stochastic = True` in the class, and define mean_leaf(values)."
            )
        start: Any = cls.__dict__.get("init_leaf")
        if inspect.isfunction(start) and len(_required_arguments(start)) > 2:
            raise TypeError(
                f"{cls.__name__}.init_leaf takes {', '.join(_required_arguments(start))}, but is called with (self, "
                f"w). If the start is random, define draw_leaf(self, w, key) instead."
            )

    def init_leaf(self, w: Array) -> dict[str, Array]:
        """The raw values whose effective array is ``w``, or the nearest one to it.

        Raises:
          TypeError: If the class defines neither this nor ``draw_leaf``.
        """
        raise TypeError(f"{type(self).__name__} defines neither init_leaf(w) nor draw_leaf(w, key). Define one.")

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        """``init_leaf`` for a stage with a random start: it defines this instead, and ``init`` needs a key."""
        del key
        return self.init_leaf(w)

    @abstractmethod
    def apply_leaf(self, *args: Any, **kwargs: Any) -> Array:
        """The effective array of the raw values, including fixed ones; a stochastic stage takes a key after them.

        If a stage defines only ``terms_leaf``, this is the sum of the terms.
        """

    def terms_leaf(self, *args: Any, **kwargs: Any) -> Sequence[Term]:
        """The effective array as a sum of terms, which :func:`factored` does not form.

        It takes what ``apply_leaf`` takes, ``(values)`` or ``(values, key)``, and the sum equals that array. You do not
        need this if ``apply_leaf`` only multiplies and adds matrices, vectors and numbers: reparax then finds the terms
        itself.

        Raises:
          TypeError: If the class does not define it.
        """
        raise TypeError(f"{type(self).__name__} defines no terms_leaf(values).")

    def mean_leaf(self, values: dict[str, Array]) -> Array:
        """The mean of ``apply_leaf(values, key)`` over all keys, if the stage is stochastic.

        Raises:
          TypeError: If a stochastic class does not define it.
        """
        del values
        raise TypeError(f"{type(self).__name__} is stochastic, but defines no mean_leaf(values). Define it.")

    def penalty_leaf(self, values: dict[str, Array]) -> Array:
        """The penalty for the raw values of one array, such as a KL divergence from a prior, to add to the loss.

        The result is one number.
        """
        del values
        return jnp.zeros(())

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        r"""The logarithm of the absolute determinant of the derivative of ``apply_leaf``, if that is a bijection.

        A stage that defines it has :meth:`Parametrization.log_det`, which samplers need. The result is one number. If
        entries of an array follow from the others, as in a symmetric matrix, leave them out of the derivative; no later
        stage of the chain can then have a log-determinant.

        Example:
          The Cholesky factor L of a correlation matrix: its rows have length 1, so the entries below its diagonal are
          free. Each is a share, from -1 to 1, of the length that the entries to the left of it leave:

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
        del values
        return jnp.zeros(())

    def update_leaf(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """The new fixed values after one training step, from the current values, as computed by earlier stages.

        It must not return free values, unless the class sets ``moves_weights = True``, and none of another shape or
        dtype.

        The formula is ``update_leaf(values)``. It may also take ``grad``, the gradient of the loss with respect to the
        effective array, and ``key``: ``update_leaf(values, grad, key)``. Then it is called only if the caller passes
        these to ``update``.
        """
        del args, kwargs
        return {}

    def rebase_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        """Raw values of the same effective array and of the same types, with the base at the current point."""
        return values

    @property
    def deterministic(self) -> Parametrization:
        return Mean(self) if self.stochastic else self

    @property
    def _bare(self) -> bool:
        """Whether the only raw value is the array itself, stored at its own path without a marker."""
        return False

    @property
    def _draws(self) -> bool:
        """Whether the start may be random."""
        return type(self).draw_leaf is not Reparametrization.draw_leaf

    @property
    def random_start(self) -> bool:
        return self._draws


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """The names of the required arguments of a function."""
    parameters = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in positional and parameter.default is inspect.Parameter.empty
    ]


def _arguments_after_values(cls: type[Any], method: str) -> list[str]:
    """The names of the required arguments of a method after the values."""
    is_bound = isinstance(inspect.getattr_static(cls, method), staticmethod | classmethod)
    return _required_arguments(getattr(cls, method))[1 if is_bound else 2 :]


def _arguments_of_update(cls: type[Any]) -> tuple[str, ...]:
    """The arguments ``grad`` and ``key`` of ``update_leaf``, wherever they stand."""
    if odd := [name for name in _arguments_after_values(cls, "update_leaf") if name not in ("grad", "key")]:
        raise TypeError(
            f"{cls.__name__}.update_leaf takes {', '.join(odd)} after the values, but can have `grad` and `key`. "
            f"Rename the arguments."
        )
    return tuple(name for name in inspect.signature(cls.update_leaf).parameters if name in ("grad", "key"))


def _class_that_writes(cls: type[Any], method: str) -> type[Any]:
    """The class from which ``cls`` inherits a method."""
    return next(base for base in cls.__mro__ if method in vars(base))


def _apply_terms(self: Reparametrization, *args: Any, **kwargs: Any) -> Array:
    """``apply_leaf`` of a class that writes only ``terms_leaf``: the sum of the terms."""
    return sum_terms(self.terms_leaf(*args, **kwargs))
