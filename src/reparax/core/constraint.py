"""Defines stages whose effective arrays lie in a constraint set, with membership tests, projections and samples.

A map is *flat* where its gradient is zero. Raw values that start at such a point would never train, so ``init`` refuses
arrays that lead to such raw values.

An array is *known* if its entries can be read, which is not the case if it is traced, or if only its shape and dtype
are given. Only known arrays are checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.core.axes import one_stacked
from reparax.core.calls import CallName
from reparax.core.fields import field
from reparax.core.leaf import Reparametrization
from reparax.core.paths import describe
from reparax.core.random import keys_of_stack
from reparax.numerics.arguments import one_of
from reparax.numerics.arithmetic import inlined, is_array, is_inexact, widened


def is_known(w: Array) -> bool:
    """Returns whether the entries of ``w`` can be read; they cannot if ``w`` is traced, or only a shape and dtype."""
    return not isinstance(w, Tracer | jax.ShapeDtypeStruct)


def why_infinite(w: Array) -> str | None:
    """Returns an error text if the entries of an array can be read and are not all finite, and otherwise None."""
    with jax.ensure_compile_time_eval():  # Known arrays are checked even under `jax.jit`.
        if not is_known(w) or _all_finite(w):
            return None
    return "expected an array of finite numbers, but got NaN or infinity. Correct it, or leave it out with `where`."


def is_near(w: Array, projection: Array, tolerance: float | Array | None) -> Array:
    """Returns whether ``w`` is within ``tolerance`` of its projection, as a boolean scalar.

    ``tolerance`` is in units of the largest entry of ``w``. None stands for a default that covers rounding errors, and
    grows with the longest axis, because rounding errors grow with the number of summands.
    """
    relative = 10 * max((1, *w.shape)) * float(jnp.finfo(w.dtype).eps) if tolerance is None else tolerance
    return _is_within(widened(w), widened(projection), relative)


@inlined
def _is_within(x: Array, projection: Array, relative: float | Array) -> Array:
    """Returns whether no entry of ``x`` is farther from its projection than ``relative`` times the largest entry."""
    distance = jnp.max(jnp.abs(projection - x), initial=0.0)
    return distance <= relative * jnp.max(jnp.abs(x), initial=0.0)


@inlined
def _all_finite(w: Array) -> Array:
    """Returns whether no entry of an array is NaN or infinite, as a boolean scalar."""
    return jnp.all(jnp.isfinite(w))


def _is_mask_for(shape: tuple[int, ...], flat: Any) -> bool:
    """Returns whether ``flat`` is a boolean array that broadcasts to ``shape``, as ``(4, 1)`` does to ``(4, 3)``."""
    is_boolean = is_array(flat) and flat.dtype == bool and flat.ndim <= len(shape)
    # Compare axes from the back. `zip` is not strict, because the first axes of `shape` may have no counterpart.
    return is_boolean and all(n in (1, size) for n, size in zip(flat.shape[::-1], shape[::-1], strict=False))


def _as_floating(who: object, w: Any) -> Array:
    """Converts ``w`` to an array with a floating or complex dtype, and raises a TypeError for a tree."""
    try:
        x = jnp.asarray(w)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{who} takes one array, but got {type(w).__name__}. Call it for each array; for a whole tree, "
            f"`p.fold(p.init(tree))` gives points of the image."
        ) from error
    return x if is_inexact(x) else x.astype(float)


Outside = Literal["nearest", "unchecked", "raise"]


class Constraint(Reparametrization):
    """A stage whose effective arrays all lie in one set, which is called its image.

    A subclass writes ``init_leaf`` and ``apply_leaf`` such that ``apply_leaf(init_leaf(w))`` is the point of the image
    nearest to ``w``. If your class returns another point, say so in its docstring. ``contains``, ``project`` and
    ``sample`` follow from these two formulas. If you know a simpler test, a simpler projection or a better
    distribution, write ``contains_leaf``, ``project_leaf`` or ``sample_leaf``. Each of these takes a single array.

    If your map has points with zero gradient, write ``flat_leaf`` as well. Weights that start at such a point would
    never train, so ``init`` refuses such weights by default.

    Args:
      outside: What ``init`` does with an array outside the image. ``"nearest"`` starts at the nearest point (or the
        point that the class defines), so the model changes; a point with zero gradient is an error. ``"unchecked"``
        does the same, but allows points with zero gradient. ``"raise"`` accepts only points of the image with nonzero
        gradient. Traced arrays are not checked, and if bounds are traced, arrays are not checked against them.
      where: As for :class:`Reparametrization`.
      stacked: As for :class:`Reparametrization`.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class Centered(rpx.stage.Constraint):
      ...     def init_leaf(self, w):
      ...         return {"x": w - w.mean()}
      ...     def apply_leaf(self, values):
      ...         return values["x"] - values["x"].mean()
      >>> Centered().project(jnp.array([1.0, 2.0, 6.0]))
      Array([-2., -1.,  3.], dtype=float32)
      >>> bool(Centered().contains(jnp.ones(3)))
      False
    """

    outside: Outside = field(one_of(Outside), default="nearest", kw_only=True)

    _for_users: ClassVar[tuple[str, ...]] = (*Reparametrization._for_users, "contains", "project", "sample")

    def _map_formula(self, method: str, formula: Callable[..., Array], w: Array, *further: Array) -> Array:
        """Applies ``formula(stage, w, *further)`` to each of the arrays stacked in ``w``, and stacks the results.

        The formula gets a stage without stacked axes. If the stage acts on matrices, each array is reshaped to a
        matrix first.

        Raises:
          ValueError: If the stage has different numbers or axes for different arrays, or its axes do not fit ``w``. In
            the second case, the error names ``method``.
        """
        if self._varying_fields:
            raise ValueError(
                f"{self!r} differs from array to array, so it has no single image. Use the stage of one array: "
                f"`stage.for_array(path, w)`."
            )
        stage_for_one = replace(self, stacked=()) if self.stacked_axes else self
        if reason := stage_for_one._axes_error(one_stacked(w, self.stacked_axes)):
            raise ValueError(f"{CallName(stage_for_one, method)}: {reason}")
        return self._map_stacked(functools.partial(formula, stage_for_one._for_merged))(w, *further)

    def flat_leaf(self, w: Array) -> Array:
        """Returns a boolean mask of the entries of ``w`` that would never train, because the gradient there is zero.

        The mask broadcasts to the shape of ``w``; it may, for example, have one entry for each row. If the gradient is
        zero for all entries that are not positive, write ``return w <= 0``. The default returns False for all entries.
        """
        return jnp.zeros((), bool)

    def project(self, w: Array) -> Array:
        """Returns the point of the image at which ``init`` starts for ``w``, by default the point nearest to ``w``.

        Raises:
          TypeError: If ``w`` is not an array.
          ValueError: If the stage differs from array to array, or cannot determine the axes of ``w``.
        """
        w = _as_floating(CallName(self, "project"), w)
        return self._map_formula("project", lambda stage, w: stage.project_leaf(w), w)

    def contains(self, w: Array, tolerance: float | None = None) -> Array:
        """Returns whether ``w``, or each of the arrays stacked in ``w``, lies in the image, as a boolean scalar.

        Args:
          w: An array with a shape that the stage accepts.
          tolerance: The largest distance that an entry may have from its projection, in units of the largest entry of
            ``w``. Default: ten times the machine epsilon times the length of the longest axis.

        Raises:
          TypeError: If ``w`` is not an array.
          ValueError: If the stage differs from array to array, or cannot determine the axes of ``w``.
        """
        w = _as_floating(CallName(self, "contains"), w)
        return jnp.all(self._map_formula("contains", lambda stage, w: stage.contains_leaf(w, tolerance), w))

    def sample(self, key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        """Returns a random point of the image, by default the projection of an array of independent normal numbers.

        Args:
          key: A typed or legacy PRNG key.
          shape: The shape of the point.
          dtype: The dtype of the point.

        Raises:
          TypeError: If ``shape`` is not a shape, or ``key`` is not a key.
          ValueError: If the stage differs from array to array, or cannot determine the axes of the point.
        """
        try:
            like = jnp.zeros(shape, dtype)  # Only the shape is read.
        except TypeError as error:
            who = CallName(self, "sample")
            raise TypeError(
                f"{who} takes a key and a shape, as in `sample(key, (3, 2))`, but got {type(shape).__name__} as the "
                f"shape."
            ) from error
        keys = keys_of_stack(key, like, self.stacked_axes)
        return self._map_formula("sample", lambda stage, w, key: stage.sample_leaf(key, w.shape, w.dtype), like, keys)

    def project_leaf(self, w: Array) -> Array:
        """Computes :meth:`project` for one array, without stacked axes. Default: ``apply_leaf(init_leaf(w))``."""
        return self.apply_leaf(self.init_leaf(w))

    def contains_leaf(self, w: Array, tolerance: float | None = None) -> Array:
        """Computes :meth:`contains` for one array, without stacked axes. Default: compares ``w`` and its projection."""
        return is_near(w, self.project_leaf(w), tolerance)

    def sample_leaf(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Computes :meth:`sample` for one array, without stacked axes. Default: the projection of normal numbers."""
        return self.project_leaf(jax.random.normal(key, shape, dtype))

    def _why_refused(self, w: Array) -> str | None:
        """Returns why the stage cannot start at ``w``, or None if it can.

        The entries of a known (not traced) array must be finite, and ``outside`` must allow them. Known arrays are
        checked even under ``jax.jit``, where operations on them would otherwise be traced.
        """
        reason = super()._why_refused(w) or why_infinite(w)
        if reason is not None or self.outside == "unchecked" or not is_known(w):
            return reason
        with jax.ensure_compile_time_eval():
            return self._refuse_outside(jnp.asarray(w)) or self._refuse_flat(jnp.asarray(w))

    def _refuse_outside(self, w: Array) -> str | None:
        """Returns an error text if ``outside`` is ``"raise"`` and ``w`` lies outside the image, and otherwise None."""
        if self.outside != "raise":
            return None
        is_inside = self.contains_leaf(w)
        if not is_known(is_inside) or is_inside:  # With traced bounds, the answer is unknown.
            return None
        return (
            "expected an array in the image of the stage, because outside='raise', but got one outside it. Start from "
            "`stage.project(w)`, or pass outside='unchecked'."
        )

    def _refuse_flat(self, w: Array) -> str | None:
        """Returns an error text if some entries of ``w`` have zero gradient and would never train, and otherwise None.

        If the result of a user's ``flat_leaf`` is not a mask for ``w``, the error text says so.
        """
        flat = self.flat_leaf(w)
        if not _is_mask_for(w.shape, flat):
            return (
                f"flat_leaf must return booleans in a shape that broadcasts to {w.shape}, but returns "
                f"{describe(flat)}. Return a mask, such as `w <= 0`."
            )
        if not is_known(flat) or not jnp.any(flat):  # With traced bounds, the answer is unknown.
            return None
        count = jnp.count_nonzero(jnp.broadcast_to(flat, w.shape))
        return (
            f"expected entries inside the image, but {count} of {w.size} are outside it or on its boundary, where the "
            f"gradient is zero, so they would never train. Start from entries inside, leave the array out with "
            f"`where`, or pass outside='unchecked' to start there anyway."
        )
