"""Stages whose image is a proper set of arrays: membership, nearest points and samples of it."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax._core.value import argument
from reparax._numerics.arguments import one_of
from reparax._numerics.arithmetic import widened
from reparax._stage.leaf import Reparametrization


def is_known(w: Array) -> bool:
    """Whether the numbers of ``w`` can be looked at."""
    return not isinstance(w, Tracer | jax.ShapeDtypeStruct)


def refuse_infinite(w: Array) -> str | None:
    """Why an array has no nearest point and no ranking, where its numbers are known and not all finite."""
    with jax.ensure_compile_time_eval():  # of a known array, also where `init` is called under `jax.jit`
        if not is_known(w) or jnp.all(jnp.isfinite(w)):
            return None
    return "expected finite numbers, got NaN or infinity. Correct the array, or leave it out with `where`."


def near(w: Array, projection: Array, tolerance: float | None) -> Array:
    """Whether ``w`` is no further from its projection than by ``tolerance``, of the meaning of ``contains``."""
    x = widened(w)
    distance = jnp.max(jnp.abs(widened(projection) - x), initial=0.0)
    units = 10 * max((1, *w.shape)) * float(jnp.finfo(w.dtype).eps) if tolerance is None else tolerance
    return distance <= units * jnp.max(jnp.abs(x), initial=0.0)


# The three methods below are written for one array: these make them act on each of those that are stacked in one.


def _project_each(method: Callable[..., Array]) -> Callable[..., Array]:
    @functools.wraps(method)
    def project(self: Any, w: Array) -> Array:
        one = self._alone
        return method(self, w) if one is self else self._over(one.project)(jnp.asarray(w))

    return project


def _all_contained(method: Callable[..., Array]) -> Callable[..., Array]:
    @functools.wraps(method)
    def contains(self: Any, w: Array, tolerance: float | None = None) -> Array:
        one = self._alone
        if one is self:
            return method(self, w, tolerance)
        return jnp.all(self._over(lambda w: one.contains(w, tolerance))(jnp.asarray(w)))

    return contains


def _sample_each(method: Callable[..., Array]) -> Callable[..., Array]:
    @functools.wraps(method)
    def sample(self: Any, key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        one = self._alone
        if one is self:
            return method(self, key, shape, dtype)
        like = jnp.zeros(shape, dtype)  # of which the shape alone is read
        return self._over(lambda w, key: one.sample(key, w.shape, w.dtype))(like, self._each_key(key, like))

    return sample


class Constraint(Reparametrization):
    """A stage whose effective arrays all lie in one set, its image.

    A subclass writes ``init_leaf`` and ``apply_leaf``, such that ``apply_leaf(init_leaf(w))`` is the point of the
    image nearest to ``w``, or one that its docstring names. Membership, projection and samples follow from these
    two; a subclass whose image has a plainer test, or a better distribution, writes its own, for one array: where
    arrays are ``stacked``, it acts on each of them.

    Where a map has points without a gradient, its author writes ``flat_leaf`` as well. Numbers that start there would
    never train, so ``init`` refuses them unless told otherwise.

    Args:
      outside: What ``init`` does with an array outside the image. ``"nearest"`` starts at the nearest point, or at
        the point that the class names, so that the model changes; a point without a gradient is an error.
        ``"project"`` starts at such a point too. ``"refuse"`` takes points of the image alone, and only where they
        have a gradient. Traced arrays and bounds are not checked: they start as by ``"project"``.
      where: As for :class:`Reparametrization`.
      stacked: As for :class:`Reparametrization`.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class Centered(rpx.Constraint):
      ...     def init_leaf(self, w):
      ...         return {"x": w - w.mean()}
      ...     def apply_leaf(self, values):
      ...         return values["x"] - values["x"].mean()
      >>> Centered().project(jnp.array([1.0, 2.0, 6.0]))
      Array([-2., -1.,  3.], dtype=float32)
      >>> bool(Centered().contains(jnp.ones(3)))
      False
    """

    outside: str = argument(one_of("nearest", "project", "refuse"), default="nearest", kw_only=True)

    _for_users: ClassVar[tuple[str, ...]] = (*Reparametrization._for_users, "contains", "project", "sample")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        for name, over_each in (("project", _project_each), ("contains", _all_contained), ("sample", _sample_each)):
            if name in vars(cls):
                setattr(cls, name, over_each(vars(cls)[name]))
        super().__init_subclass__(**kwargs)

    @property
    def _alone(self) -> Self:
        """This stage for one of the arrays that the methods below are written for."""
        if self._varied:
            raise ValueError(
                f"{self!r} has numbers for several arrays, so it does not say of one array alone what its image is. "
                f"Ask a stage with one number, or `stage.for_array(path, w)`."
            )
        return self._unstacked

    def flat_leaf(self, w: Array) -> Array:
        """Which numbers of ``w`` start where the map is flat, so that no gradient would ever move them.

        By default none. The result is boolean, of the shape of ``w`` or of one that broadcasts to it, such as one truth
        for each row: ``return w <= 0`` says that a map has no gradient for what is not positive.
        """
        del w
        return jnp.zeros((), bool)

    @_project_each
    def project(self, w: Array) -> Array:
        """The point of the image where ``init`` starts from ``w``: the nearest, unless the class names another."""
        return self.apply_leaf(self.init_leaf(jnp.asarray(w)))

    @_all_contained
    def contains(self, w: Array, tolerance: float | None = None) -> Array:
        """Whether ``w`` lies in the image, as a boolean scalar.

        Args:
          w: An array of a shape that the stage takes.
          tolerance: The largest distance of an entry from its projection, in units of the largest entry of ``w``.
            Default: ten times the machine epsilon times the length of the longest axis.
        """
        return near(jnp.asarray(w), self.project(w), tolerance)

    @_sample_each
    def sample(self, key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        """A random point of the image: the projection of an array of independent normal numbers.

        Args:
          key: A typed or legacy PRNG key.
          shape: Its shape.
          dtype: Its dtype.
        """
        return self.project(jax.random.normal(key, shape, dtype))

    def refuse(self, w: Array) -> str | None:
        why = super().refuse(w) or refuse_infinite(w)
        if why is not None or self.outside == "project" or not is_known(w):
            return why
        with jax.ensure_compile_time_eval():
            return self._refuse_outside(jnp.asarray(w)) or self._refuse_flat(jnp.asarray(w))

    def _refuse_outside(self, w: Array) -> str | None:
        # With a traced bound, nobody knows the answer.
        if self.outside != "refuse" or not is_known(inside := self.contains(w)) or inside:
            return None
        return (
            "expected a point of the image, got one outside. Start from `stage.project(w)`, or let "
            "`outside='project'` do it."
        )

    def _refuse_flat(self, w: Array) -> str | None:
        flat = self.flat_leaf(w)
        if not is_known(flat) or not jnp.any(flat):
            return None
        count = jnp.count_nonzero(jnp.broadcast_to(flat, w.shape))
        return (
            f"expected numbers that a gradient can move, got {count} of {w.size} outside of the image or at its edge, "
            f"where the map is flat. Start from numbers inside, leave the array out with `where`, or say "
            f"outside='project' to start there even so."
        )
