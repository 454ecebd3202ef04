"""Defines parametrizations, their composition into chains, chains from JSON, and the mean of a random stage.

:class:`Parametrization` is both the base class of stages and the type of chains. Its public methods, ``init``,
``apply`` and so on, work on whole trees and loop over the stages of a chain (``_parts``); a single stage is a chain of
one. These methods are the same for all chains. Stages differ in their private methods whose names end in ``_at``, each
of which calls a formula of the stage at one :class:`Site`, that is, for one array or one group of arrays.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import jax
import jax.numpy as jnp

from reparax.core.axes_at import visit_with_roles
from reparax.core.calls import (
    CallName,
    checked_key,
    describe_non_stage,
    key_for_apply,
    parts_of,
    require_no_references,
    with_any_key,
)
from reparax.core.checks import require_no_differences
from reparax.core.config import dump_stages, expression, load_stages
from reparax.core.fields import Static
from reparax.core.formulas import total_log_det, total_penalty, update_bases, update_fixed
from reparax.core.initialization import follow_axes, initialize, with_boxes
from reparax.core.names import FORMULA_METHODS, METHODS
from reparax.core.originals import require_unmoved, undo_stages, with_array
from reparax.core.origins import Origins
from reparax.core.paths import PyTree, types_of_result
from reparax.core.plan import plan_for, plan_stages, require_no_markers, run_plan
from reparax.core.raw import Flat, flatten, nest, require_no_raw
from reparax.core.roles import Misfit
from reparax.core.shardings import AnyMesh, shardings_of_raw
from reparax.core.site import Site, stage_key
from reparax.core.values import RawValues
from reparax.numerics.arguments import is_integer

T = TypeVar("T")


class Parametrization(Static, ABC):
    """A pure map from the raw tree that is trained to the effective tree that the model reads, with a right inverse.

    ``init`` computes the raw tree, which the optimizer trains, from the model's parameters. ``apply`` computes the
    effective tree, which the model reads, from the raw tree. ``update`` changes the fixed values, such as masks, once
    per step. All three are pure functions and work under ``jax.jit``, ``jax.vmap`` and ``jax.eval_shape``.

    ``fold(init(w)) == w`` up to rounding for each ``w`` in the image of a stage, that is, for each array that its
    formula can return. In a chain, ``init`` inverts the stages one by one, from the last to the first. So the equation
    holds if the array with which each stage is initialized lies in the image of the stages before it: for ``LowRank(2)
    >> WeightNorm()`` at every matrix of rank 2, but for ``Symmetric() >> WeightNorm()`` only at symmetric matrices. For
    any other ``w``, training starts at another array in the image of the chain; :func:`summary` shows how far that
    array is from ``w``.

    Derive a stage of your own from :class:`Reparametrization`, :class:`Perturbation` or :class:`Constraint` for
    formulas on one array, or from :class:`Joint` for formulas on several. Subclasses become frozen dataclasses without
    a decorator: hashable, comparable, picklable, static to JAX, with source code that rebuilds them as ``repr``.

    Raises:
      TypeError: If a class derives directly from this one, because this class does not define the arrays on which a
        stage acts.
    """

    stochastic: ClassVar[bool] = False
    """Whether ``apply`` draws random numbers, so that it needs a key."""
    changes_type: ClassVar[bool] = False
    """Whether the stage may change the shape or dtype of the model's arrays."""
    straight_through: ClassVar[bool] = False
    """Whether ``apply`` replaces the true gradient by another, as when rounding gets the gradient of the identity."""

    moves_weights: ClassVar[bool] = False
    """Whether ``update`` also changes trainable values; for example, it may set regrown weights to zero."""
    needs_update: ClassVar[bool] = False
    """Whether the weights are wrong unless each training step calls ``update``; :func:`optimizer` then requires it."""
    starts_elsewhere: ClassVar[bool] = False
    """Whether ``apply(init(w))`` is meant to differ from ``w``. True suppresses the warning about this difference."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises a TypeError for a subclass that does not define ``sites``, or that overrides a method of whole chains.

        ``Chain`` defines ``_parts``, its stages, instead of ``sites``, because each stage defines its own ``sites``.
        """
        if cls.sites is Parametrization.sites and "_parts" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} derives directly from Parametrization, which does not define on which arrays a stage "
                f"acts. Derive from Reparametrization or Perturbation for a formula on one array, or from Joint for a "
                f"formula on several."
            )
        if verbs := [verb for verb in FORMULA_METHODS if getattr(cls, verb) is not getattr(Parametrization, verb)]:
            raise TypeError(
                f"{cls.__name__} defines {verbs[0]}, which chains never call on their stages. Define the formula "
                f"{verbs[0]}_leaf for one array instead, or derive from Joint for several arrays."
            )
        super().__init_subclass__(**kwargs)

    _for_users: ClassVar[tuple[str, ...]] = METHODS

    def init(self, params: T, key: jax.Array | None = None) -> T:
        """Returns the raw tree whose effective tree is ``params``, up to rounding.

        If the chain cannot represent ``params``, the effective tree differs from ``params``; see
        :class:`Parametrization`. Arrays that no stage changes, such as the base of an adapter, are the same objects as
        in ``params``, so donating the raw tree also deletes them in ``params``. If you need ``params`` later, copy
        them: ``raw = jax.tree.map(jnp.copy, p.init(params))``.

        Args:
          params: The model's parameters.
          key: A typed or legacy PRNG key; required if ``random_init`` is true, as for :class:`LoRA`.

        Raises:
          TypeError: If ``params`` is not a tree of arrays, or ``key`` is not a key.
          ValueError: If ``random_init`` is true and there is no key, if a stage selects nothing or selects an array
            that it cannot take, or if ``params`` is a raw tree.
        """
        typed_key = self._init_key("init", key)
        require_no_references(self, "init", params)
        advice = "Call `init` once, with the whole chain, and pass its result to `apply`."
        require_no_raw(CallName(self, "init"), params, advice)
        tree = flatten(params)
        return nest(with_boxes(self._parts, tree, initialize(self._parts, tree, typed_key)))

    def _follow(self, params: PyTree) -> Origins:
        """Maps each raw value to its parameter, and each of its axes to a parameter axis; see ``follow_axes``."""
        return follow_axes(self._parts, flatten(params))[1]

    def _init_key(self, method: str, key: jax.Array | None) -> jax.Array | None:
        """Returns ``key`` as a typed PRNG key; a fixed key replaces None, which is an error if ``random_init`` is true.

        ``method`` is the name of the chain's method that received the key, for errors.
        """
        needed = "Pass a key last, `jax.random.key(0)`." if self.random_init else ""
        typed_key = checked_key(self, method, key, needed=needed)
        return jax.random.key(0) if typed_key is None else typed_key

    def apply(self, raw: T, key: jax.Array | None = None, *, upto: int | None = None) -> T:
        """Computes the effective tree, which the model reads, from the raw tree.

        Args:
          raw: The result of ``init``, before or after steps of an optimizer.
          key: A typed or legacy PRNG key; required if ``stochastic`` is true, otherwise not used.
          upto: The index of a stage. The result is then the tree that this stage reads: the stages ``p[:upto]`` are
            applied, with the same random draws as in the whole chain, and the marker dicts that hold the raw values of
            the stages ``p[upto:]`` are left in place. None, like ``len(p)``, applies the whole chain.

        Raises:
          TypeError: If ``raw`` is not a tree of arrays, or ``key`` is not a key but, for example, the model's data.
          ValueError: If a random chain gets no key, ``raw`` is not a raw tree of this chain, or there is no such stage.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> p = rpx.numbers.Scale(2.0) >> rpx.WeightNorm(axis=None)
          >>> raw = p.init({"w": jnp.array([[3.0, 4.0]])})
          >>> p.apply(raw, upto=1)["w"]["@weight_norm"]["v"]  # the direction that `WeightNorm` reads
          Array([[3., 4.]], dtype=float32)
        """
        if upto is not None and (not is_integer(upto) or upto not in range(len(self) + 1)):
            raise ValueError(
                f"{CallName(self, 'apply')} takes a number of stages from 0 to {len(self)} as upto, but got {upto!r}. "
                f"Leave out upto to apply all stages."
            )
        require_no_references(self, "apply", raw)
        typed_key = key_for_apply(self, key)
        tree, n_stages = flatten(raw), len(self) if upto is None else upto
        planned = plan_stages("apply", self._parts[:n_stages], tree)
        require_no_markers(CallName(self, "apply"), planned.after, later=self._parts[n_stages:])
        return run_plan(planned, typed_key)

    def original(self, raw: T) -> T:
        """Returns the model's parameters with all stages undone, if the raw tree still holds these parameters.

        :meth:`fold` returns the weights that the model reads; ``original`` returns the weights without the stages.
        Pruned and masked weights have their unpruned and unmasked values, bit for bit. Frozen weights and the base of
        an adapter, also under the norm of DoRA, are the arrays that ``init`` received. Weights that are trained under
        noise, pruning or a spectral norm have their trained values. For :class:`Quantized`, the codes are decoded. In a
        jitted step, the arrays are those of ``raw``, not copies. torch calls this the original of a parametrization:
        ``remove_parametrizations(module, "weight", leave_parametrized=False)``.

        Raises:
          TypeError: If ``raw`` is not a tree of arrays.
          ValueError: If ``raw`` is not a raw tree of this chain, or a stage keeps no original, because its raw values
            are other arrays, as for :class:`Orthogonal`, or several arrays that are trained together, as for
            :class:`WeightNorm`. For pruning before a norm, ``fold(raw, without=MagnitudePruning)`` undoes the pruning
            and keeps the norm.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> p = rpx.MagnitudePruning(0.5)
          >>> raw = p.init({"w": jnp.array([[1.0, 2.0]])})
          >>> p.fold(raw), p.original(raw)
          ({'w': Array([[0., 2.]], dtype=float32)}, {'w': Array([[1., 2.]], dtype=float32)})
        """
        return run_plan(undo_stages(plan_for(self, raw, "original", mean=True), lambda stage: True), None)

    def set(self, raw: T, path: str, w: Any, key: jax.Array | None = None) -> T:
        """Returns ``raw`` with new raw values for one array, so that ``apply`` gives ``w`` at ``path``.

        If the chain cannot represent ``w``, ``apply`` gives the same array as after ``init`` with ``w``. All raw values
        of the array are initialized anew. For an adapter, ``w`` becomes the base, which replaces the frozen one, and
        the trained factors are lost. All other arrays of ``raw`` stay the same, bit for bit. In torch, this is
        ``module.weight = w`` under a parametrization.

        Args:
          raw: The raw tree.
          path: The path of an array of the model, such as ``"dense/kernel"``.
          w: The new effective array.
          key: The same as for ``init``.

        Raises:
          ValueError: If there is no array at ``path``, if a stage computes the array together with others or cannot
            take ``w``, if ``w`` has the wrong shape or dtype, if ``random_init`` is true and there is no key, or if
            ``raw`` is not a raw tree of this chain.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> p = rpx.Positive("exp")
          >>> raw = p.set(p.init({"a": jnp.ones(2), "b": jnp.ones(2)}), "b", jnp.full(2, jnp.e))
          >>> raw["b"]
          {'@positive': {'x': Array([1., 1.], dtype=float32)}}
        """
        return with_array(self, raw, path, w, self._init_key("set", key))

    def update(self, raw: T, key: jax.Array | None = None, grads: PyTree = None) -> T:
        """Returns ``raw`` with its fixed values, such as masks, updated for one training step.

        Trained values do not change, except under :class:`RigL` and :class:`SET`, where regrown weights start at zero.

        Args:
          raw: The result of ``init``, before or after steps of an optimizer.
          key: For stages that draw random numbers, such as :class:`SET`: a new key for each update. The key may also be
            passed to ``init`` or ``apply``, because ``update`` draws other numbers from it. Without a key, these stages
            do nothing.
          grads: For stages that read gradients, such as :class:`RigL`: the gradient of the loss with respect to the
            effective tree, ``jax.grad(loss)(p.fold(raw))``. Each stage receives the gradient of its own weights.
            Without ``grads`` these stages do nothing.

        Raises:
          TypeError: If ``key`` is not a key.
          ValueError: If ``raw`` is not a raw tree of this chain, or ``grads`` do not fit its effective tree.
        """
        typed_key = checked_key(self, "update", key)
        return nest(update_fixed(CallName(self, "update"), plan_for(self, raw, "update", mean=True), typed_key, grads))

    def update_base(self, raw: T) -> T:
        """Returns ``raw`` with each base moved to the current weights, and the values relative to the base set to zero.

        A base is a fixed array to which trained values are relative, as in ``w = base @ expm(x)``. The effective tree
        does not change. An optimizer's momentum for ``x`` belongs to the old base; relative to the new base, the same
        momentum means another direction. Restart the optimizer with ``tx.init(raw)``, or call this method rarely.

        Raises:
          ValueError: If ``raw`` is not a raw tree of this chain, or an earlier stage computes the values that would
            change, as :class:`Mask` and :class:`Scale` do before an :class:`Orthogonal`: put that stage later.
        """
        return nest(update_bases(plan_for(self, raw, "update_base", mean=True)))

    def penalty(self, raw: PyTree) -> jax.Array:
        """Returns the sum of the penalties of all stages, a scalar in float32 or wider, to be added to the loss.

        A penalty is a divergence from a prior, an expected number of weights, or a distance from the base. Each stage
        computes its penalty from its raw values, without the noise of earlier stages. Without penalties, the sum is 0.

        Raises:
          ValueError: If ``raw`` is not a raw tree of this chain.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> p = rpx.Gaussian(std=1.0, prior=1.0)
          >>> p.penalty(p.init({"w": jnp.ones(4)}))  # half the square of each mean
          Array(2., dtype=float32)
        """
        return total_penalty(plan_for(self, raw, "penalty", mean=True))

    def log_det(self, raw: PyTree) -> jax.Array:
        r"""Returns the log-determinant of the Jacobian, :math:`\log |\det \partial w / \partial x|`, float32 or wider.

        The log-determinant turns a log-density of effective weights :math:`w` into one of raw values :math:`x`: for
        Hamiltonian Monte Carlo on ``raw``, use ``log_prior(p.apply(raw)) + p.log_det(raw)``. Each stage must be a
        bijection of its values, such as :class:`Positive`, :class:`Bounded` and ``PositiveDefinite("cholesky")``. A
        bijection of your own defines :meth:`Reparametrization.log_det_leaf`, whose example is the Cholesky factor of a
        correlation matrix.

        For a symmetric matrix, only the n (n + 1) / 2 independent entries count, as in numpyro. A :class:`Simplex` has
        one raw entry more than it needs, and adds the log-density of that entry, on which the weights do not depend. No
        stage may follow such a stage in the chain, because it would count dependent entries too. A stage before it acts
        on independent values, and is allowed. Noise is replaced by its mean, and frozen values do not count.

        Raises:
          ValueError: If a stage is not a bijection, does not define its log-determinant, acts on entries that are
            determined by others, or has only some of its values frozen; the error names the stage.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> p = rpx.Positive("exp")
          >>> p.log_det(p.init({"w": jnp.exp(jnp.array([1.0, 2.0]))}))  # the sum of the raw values
          Array(3., dtype=float32)
        """
        return total_log_det(plan_for(self, raw, "log_det", mean=True))

    @property
    def has_update(self) -> bool:
        """Whether any stage changes values in ``update``."""
        return any(stage._unwrapped._defines("update") for stage in self._parts)

    @property
    def random_init(self) -> bool:
        """Whether initial values are random, so that ``init`` needs a key.

        This is true for a stage whose formula ``init_leaf`` takes a key, and for a chain with any such stage.
        """
        return self._init_takes_key

    @property
    def _parts(self) -> tuple[Parametrization, ...]:
        """The stages of the chain; for a single stage, only the stage itself."""
        return (self,)

    @property
    def deterministic(self) -> Parametrization:
        """The chain without randomness, for evaluation and export; each random stage is replaced by its mean."""
        return self

    def raw_paths(self, params: PyTree) -> dict[str, str | tuple[str, ...]]:
        """Maps the path of each array of ``params`` to the path at which the raw tree holds its values.

        Most arrays are mapped to their own path. An array that is computed from another, such as a tied array, is
        mapped to the path of the other array, and an array that is computed from several others to a tuple of paths.

        Raises:
          ValueError: If ``params`` is a raw tree, or ``init`` raises an error for it.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> rpx.Tie({"out": "in"}).raw_paths({"in": jnp.ones(2), "out": jnp.ones(2)})
          {'in': 'in', 'out': 'in'}
        """
        require_no_raw(CallName(self, "raw_paths"), params, "Pass `params`.")
        steps = plan_for(self, types_of_result(with_any_key(self.init), params)).steps
        sources_of_stages = [dict(chain(*(site.copies.items() for site in step.sites))) for step in steps]

        def owners(path: str, stages: Sequence[Mapping[str, tuple[str, ...]]]) -> list[str]:
            """Returns the paths at which the raw tree holds the values of an array computed by ``stages``.

            The last stage that computes the array from other arrays gives the paths of these other arrays. Each path is
            looked up in all ``stages`` again, because the same stage may also compute that array from others, as when
            an array is tied to a tied array.
            """
            if not stages:  # No stage computes the array from others, so the raw tree has its values.
                return [path]
            *earlier, last = stages
            if path not in last:
                return owners(path, earlier)
            return [owner for source in last[path] for owner in owners(source, stages)]

        paths = [leaf.path for leaf in flatten(params).leaves() if leaf.is_there]
        found = {path: tuple(dict.fromkeys(owners(path, sources_of_stages))) for path in paths}  # Keep each owner once.
        return {path: owned_by[0] if len(owned_by) == 1 else owned_by for path, owned_by in found.items()}

    def with_axes(self, roles: PyTree) -> Parametrization:
        """Returns this chain with its axes filled in from ``roles``, which :func:`roles` reads from a network's jaxpr.

        Axes given as words, ``"inputs"``, ``"outputs"`` or ``"stacked"``, become integers, by path if arrays differ.
        Axes that you did not set become integers too, if they have a meaning in the formula: :class:`WeightNorm` has a
        norm for each output; :class:`SpectralNorm` and :class:`LoRA` take the matrix of inputs and outputs of each
        stacked array. The page "Axes of a network" has a table. Axes given as integers or by a library's name do not
        change. If raw values of one array need different axes, as the two factors of :class:`LowRank` may, one stage
        becomes several. The result is an ordinary chain, whose ``init`` and ``apply`` need no roles.

        Args:
          roles: The result of ``rpx.roles(loss, params, batch)``, or a model of nnx or equinox layers.

        Raises:
          TypeError: If ``roles`` is neither a tree of roles nor such a model.
          ValueError: If a stage needs an axis of an array that the network does not multiply by data, or that it uses
            in several ways.

        Example:
          >>> import jax, jax.numpy as jnp, reparax as rpx
          >>> def forward(params, x):  # weights of the shape (out, in)
          ...     return x @ params["w"].T
          >>> found = rpx.roles(forward, {"w": jnp.ones((2, 3))}, jnp.ones((5, 3)))
          >>> (rpx.WeightNorm() >> rpx.VarNoise(0.1)).with_axes(found)
          WeightNorm(axis=-2) >> VarNoise(0.1)
        """

        def numbered(stage: Parametrization, tree: Flat) -> list[Parametrization]:
            """Returns copies of ``stage`` with integer axes; for the mean of a random stage, means of such copies."""
            stages = stage._unwrapped._with_axes(tree)
            return stages if stage._unwrapped is stage else [part.deterministic for part in stages]

        return _chain_of(tuple(visit_with_roles(CallName(self, "with_axes"), self._parts, roles, numbered)))

    def fold(self, raw: T, *, without: Parametrization | type[Parametrization] | None = None) -> T:
        """Returns plain parameters for evaluation and export: ``p.deterministic.apply(raw)``.

        Args:
          raw: The result of ``init``, before or after steps of an optimizer.
          without: A stage to undo, a class of stages to undo, or a chain of several stages to undo. They are undone as
            :meth:`original` undoes all stages; the other stages are applied.

        Raises:
          TypeError: If ``raw`` is not a tree of arrays, or a random stage does not define its mean.
          ValueError: If ``raw`` is not a raw tree of this chain, or ``without`` is not a stage of the chain or keeps no
            original.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> p = rpx.MagnitudePruning(0.5) >> rpx.numbers.Scale(2.0)
          >>> raw = p.init({"w": jnp.array([[1.0, 2.0]])})
          >>> p.fold(raw)["w"], p.fold(raw, without=rpx.MagnitudePruning)["w"]
          (Array([[0., 2.]], dtype=float32), Array([[1., 2.]], dtype=float32))
        """
        planned = plan_for(self, raw, "fold", mean=True)
        if without is None:
            return run_plan(planned, None)
        undone_keys = [stage_key(part) for part in without._parts] if isinstance(without, Parametrization) else []

        def is_undone(stage: Any) -> bool:
            """Returns whether ``stage`` is an instance of the class ``without``, or equal to a stage in ``without``."""
            return isinstance(stage, without) if isinstance(without, type) else stage_key(stage) in undone_keys

        if not any(is_undone(stage._unwrapped) for stage in self._parts):
            raise ValueError(
                f"{CallName(self, 'fold')} takes a stage of the chain, or its class, as `without`, but got "
                f"{without!r}. Pass a stage of the chain, for example `p[0]`."
            )
        return run_plan(undo_stages(planned, is_undone), None)

    # The methods below are called by plans and by ``initialization.py``, which run the formulas of a stage.

    draws_by_type: ClassVar[bool] = False
    """Whether ``draw(w, key)`` reads only the shape and dtype of ``w``; ``perturb(w, drawn)`` then adds the draw."""
    _is_layout: ClassVar[bool] = False
    """Whether the stage only moves and copies entries, so that ``apply`` returns exactly what ``init`` received."""
    _converts: ClassVar[tuple[str, ...]] = ()
    """The fields in which two stages of this class may differ so that ``_convert`` can convert their raw values."""

    def _convert(self, old: Any, values: Mapping[str, Any], fresh: Mapping[str, Any]) -> Mapping[str, Any]:
        """Converts raw values of the stage ``old`` to raw values of this stage for the same array; for ``transfer``.

        ``old`` is of the same class, and differs only in the fields ``_converts``. ``values`` holds its raw values, and
        ``fresh`` the values that ``init`` of this stage would return. ``LoRA(8)``, for example, extends the factors of
        ``LoRA(4)``. By default, the values are returned unchanged.
        """
        return values

    def _grown_values(self, old: Any) -> Sequence[str]:
        """Returns the names of the values that ``_convert`` extends.

        The first entries of these values are those of the stage ``old``. An optimizer's state for the values can be
        extended in the same way.
        """
        return ()

    @property
    def update_reads(self) -> tuple[str, ...]:
        """The arguments of the formula ``update_leaf`` besides the values: ``"grad"``, ``"key"``, both, or none.

        ``"grad"`` is the gradient with respect to the stage's output.
        """
        return ()

    @property
    def _init_takes_key(self) -> bool:
        """Whether ``init_leaf`` of this stage takes a key, so that ``random_init`` is true."""
        return False

    @property
    def _unwrapped(self) -> Any:
        """The stage itself; for a :class:`Mean`, the random stage that it replaces, with the same sites and values."""
        return self

    def sites(self, method: str, tree: Flat) -> list[Site]:
        """Returns the sites of the stage: one for each array, or group of arrays, on which the stage acts.

        For ``init``, these are arrays in ``tree``; for other methods, arrays whose raw values are in ``tree``. A stage
        without raw values acts on arrays in ``tree`` for all methods. Raises an error if the stage selects nothing, or
        selects an array that it cannot take.
        """
        raise NotImplementedError

    def _require_taken(self, w: Any) -> None:
        """Raises an error if the stage cannot take the array ``w``, such as a vector where it needs a matrix."""

    def _check_values_at(self, who: CallName, tree: Flat, path: str) -> None:
        """Raises an error if the raw values at ``path`` cannot belong to this stage, and otherwise does nothing.

        Plans call this for raw values that no stage has read; the error explains why.
        """

    def _init_at(self, site: Site, arrays: Mapping[str, jax.Array], key: jax.Array | None) -> RawValues:
        """Computes the initial raw values from the arrays: ``{"w": {"g": ..., "v": ...}}`` from ``{"w": w}``.

        ``key`` is None if ``init`` is not random, or if only types are needed.
        """
        raise NotImplementedError

    def _check_init(self, values: RawValues, arrays: Mapping[str, jax.Array]) -> None:
        """Raises an error if the types of ``apply(values)``, for initial ``values``, would differ from ``arrays``."""

    def _check_values(self, values: RawValues, effective: Mapping[str, Any]) -> None:
        """Raises an error unless ``init`` returns raw values of these types for arrays of the types ``effective``."""

    def _apply_at(self, site: Site, values: RawValues, key: jax.Array | None) -> Mapping[str, Any]:
        """Computes the effective arrays from raw values, by name: ``{"w": w}`` from ``{"w": {"g": ..., "v": ...}}``.

        Without a key, a random stage computes its mean.
        """
        raise NotImplementedError

    def _update_at(self, site: Site, values: RawValues, grads: Mapping[str, Any], key: jax.Array | None) -> RawValues:
        """Returns the new raw values of one training step. Raw values that do not change may be omitted.

        If the formula takes gradients, ``grads`` holds the gradient with respect to each effective array. If the
        formula takes a key, ``key`` is not None.
        """
        return {}

    def _update_base_at(self, site: Site, values: RawValues) -> RawValues:
        """Returns raw values that give the same effective arrays, but are relative to a base at the current point.

        A *base* is a fixed value to which the free values are relative, as in ``w = base @ expm(x)``.
        """
        return values

    def _number_at(self, site: Site, formula: str, values: RawValues) -> jax.Array:
        """Computes the penalty or the log-determinant; ``formula`` is ``"penalty"`` or ``"log_det"``.

        For stacked arrays, the result is an array with one number for each stacked array.
        """
        return jnp.zeros(())

    def _defines(self, verb: str) -> bool:
        """Returns whether the stage has a formula for ``verb``: ``"update"``, ``"update_base"`` or ``"log_det"``."""
        return False

    def _with_axes(self, tree: Flat) -> list[Any]:
        """Returns copies of this stage with numbers as axes.

        ``tree`` holds array types with the roles of a network's arrays. The list has one stage, unless raw values of
        one array need different axes. This default is for stages without axes.
        """
        return [self]

    def _misfits(self, tree: Flat) -> Iterable[Misfit]:
        """Returns a report, for ``check_axes``, of each axis of the stage that contradicts the roles in a network.

        ``tree`` holds array types with the roles of a network's arrays. A stage without axes has no reports.
        """
        return ()

    if not TYPE_CHECKING:  # Hidden, so that type checkers reject calls of a chain.

        def __call__(self, *_: Any, **__: Any) -> None:
            """Raises an error that names ``apply`` and ``init``, since a call could mean either."""
            raise TypeError(
                f"{self!r} was called as a function. Write `p.apply(raw, key)` for the effective tree, or "
                f"`p.init(params)` for the raw tree."
            )

    def __rshift__(self, other: Parametrization) -> Parametrization:
        """Returns the chain ``a >> b``: this stage or chain acts first, on the raw values, and then ``other``."""
        right: Any = other
        if not isinstance(right, Parametrization):
            raise TypeError(f"{self!r} >> ...: expected a stage, but got {describe_non_stage(right)}")
        return _chain_of((self, right))

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Parametrization]:
        return iter(self._parts)

    @overload
    def __getitem__(self, i: int) -> Parametrization: ...
    @overload
    def __getitem__(self, i: slice) -> Chain: ...
    def __getitem__(self, i: int | slice) -> Parametrization:
        """Returns one stage. For a slice, such as ``p[1:]``, returns a chain, even a chain of only one stage."""
        return Chain(self._parts[i]) if isinstance(i, slice) else self._parts[i]

    def __repr__(self) -> str:
        return expression(self)

    def to_json(self) -> str:
        """Returns the configuration as JSON, to store beside a checkpoint; :func:`from_json` reads it."""
        is_one = len(self._parts) == 1  # A chain of one stage does not equal that stage.
        return dump_stages((self,) if is_one else self._parts)

    def check(self, raw: PyTree, like: PyTree | None = None, *, since: PyTree | None = None) -> None:
        """Checks that a raw tree, such as a restored checkpoint, has the stages, shapes and dtypes of ``init(like)``.

        If ``since`` is given, checks that no fixed value has changed: a bare ``optax.adamw``, for example, changes a
        frozen base through weight decay. Fixed values that ``update`` changes, such as the vectors of
        :class:`SpectralNorm`, may change.

        Args:
          raw: The raw tree to check.
          like: The model's parameters, or their shapes and dtypes.
          since: An earlier raw tree of the same training.

        Raises:
          TypeError: If there is neither ``like`` nor ``since``.
          ValueError: If the raw tree differs. The error names each path that is missing, unexpected, or has another
            shape, dtype or stage, or each fixed value that changed.

        Example:
          >>> import jax, jax.numpy as jnp, reparax as rpx
          >>> p = rpx.Freeze()
          >>> raw = p.init({"w": jnp.ones(4)})
          >>> p.check(jax.tree.map(lambda x: 0.9 * x, raw), since=raw)  # doctest: +ELLIPSIS
          Traceback (most recent call last):
            ...
          ValueError: Freeze().check found fixed values that differ from those of `since`:
            w/@freeze/@fixed/w: 4 of 4 numbers differ
          An optimizer changed them, for example by weight decay. Wrap it with `rpx.optimizer(tx, p)`, or ...
        """
        if like is None and since is None:
            raise TypeError(
                f"{CallName(self, 'check')} got neither `like` nor `since`. Pass like=params, or since=raw with an "
                f"earlier raw tree."
            )
        if like is not None:
            require_no_raw(CallName(self, "check"), like, "Pass `like=params`; to compare two raw trees, `since=raw`.")
            require_no_differences(CallName(self, "check"), raw, like, with_any_key(self.init))
        if since is not None:
            require_unmoved(CallName(self, "check"), self._parts, raw, since)

    def shardings(
        self, specs: PyTree, mesh: AnyMesh, like: PyTree | None = None, *, memory_kind: str | None = None
    ) -> PyTree:
        """Returns shardings for the raw tree, in which each axis is sharded like the parameter axis it corresponds to.

        An axis of a raw value is not sharded if it corresponds to no parameter axis, or if its size is not divisible by
        the sizes of the mesh axes. If a parameter's own axis is not divisible, an error is raised. Nothing is computed:
        each stage is only traced, once for each type of array.

        Args:
          specs: A PartitionSpec (or NamedSharding) for each of the model's parameters; or arrays placed on a mesh.
          mesh: The mesh.
          like: The model's parameters, or their shapes and dtypes; not needed if ``specs`` are arrays.
          memory_kind: The memory kind of fixed values, such as ``"pinned_host"`` for the frozen base of an adapter; all
            other values stay in device memory. A jitted step must move the fixed values there before ``apply``:
            ``jax.device_put(raw, p.shardings(specs, mesh, like))``.

        Raises:
          ValueError: If a spec is missing, or does not fit its array or the mesh; if ``specs`` has no shapes and
            ``like`` is not given; or if ``like`` is a raw tree, or ``init`` raises an error for it.

        Example:
          >>> import jax, jax.numpy as jnp, reparax as rpx
          >>> from jax.sharding import AbstractMesh, PartitionSpec
          >>> mesh, specs = AbstractMesh((2, 4), ("data", "model")), {"w": PartitionSpec("data", "model")}
          >>> shardings = rpx.WeightNorm().shardings(specs, mesh, like={"w": jnp.ones((8, 16))})
          >>> jax.tree.map(lambda sharding: sharding.spec, shardings)
          {'w': {'@weight_norm': {'g': P(None, 'model'), 'v': P('data', 'model')}}}
        """
        who = CallName(self, "shardings")
        return shardings_of_raw(who, with_any_key(self.init), self._follow, specs, mesh, like, memory_kind)


class Chain(Parametrization):
    """Stages in order, as built by ``a >> b``: the first acts on the raw values. ``Chain()`` is the identity.

    A chain keeps the stages as you wrote them: ``len(p)``, ``p[0]``, ``p[1:]`` and loops work. A single stage counts as
    a chain of one. ``init`` inverts the stages one by one, from the last to the first; see :class:`Parametrization` for
    when it is exact.

    Args:
      stages: The stages. A chain among them is replaced by its stages.

    Raises:
      TypeError: If ``stages`` has the wrong type.

    Example:
      >>> import reparax as rpx
      >>> p = (rpx.WeightNorm() >> rpx.VarNoise(3.0)) >> rpx.VarNoise(4.0)
      >>> p
      WeightNorm() >> VarNoise(3.0) >> VarNoise(4.0)
      >>> len(p), p[0], p.deterministic
      (3, WeightNorm(), WeightNorm())
    """

    stages: tuple[Parametrization, ...] = ()

    stochastic: ClassVar[Any] = property(lambda self: any(stage.stochastic for stage in self.stages))
    changes_type: ClassVar[Any] = property(lambda self: any(stage.changes_type for stage in self.stages))
    straight_through: ClassVar[Any] = property(lambda self: any(stage.straight_through for stage in self.stages))
    random_init: ClassVar[Any] = property(lambda self: any(stage.random_init for stage in self.stages))

    def __post_init__(self) -> None:
        """Raises a TypeError unless ``stages`` holds only stages and chains, and replaces each chain by its stages."""
        stages: Any = self.stages
        if not isinstance(stages, tuple):
            text = repr(stages) if isinstance(stages, Static | list) else "a value"
            raise TypeError(
                f"Chain takes a tuple of parametrizations, but got {text} of type {type(stages).__name__}. "
                f"Write `a >> b`, or `rpx.Chain((a, b))`."
            )
        object.__setattr__(self, "stages", tuple(stage for part in self.stages for stage in parts_of(part)))

    def __repr__(self) -> str:
        """Returns source code that rebuilds the chain, such as ``a >> b``.

        A one-stage chain is written ``Chain((a,))``, because the bare stage does not compare equal to it.
        """
        if len(self.stages) > 1:
            return " >> ".join(map(repr, self.stages))
        return f"Chain({self.stages!r})" if self.stages else "Chain()"

    def __bool__(self) -> bool:
        return True  # Even the identity chain, whose length is 0, is true.

    @property
    def _parts(self) -> tuple[Parametrization, ...]:
        """The stages, none of which is a chain."""
        return self.stages

    @property
    def deterministic(self) -> Parametrization:
        """The chain of the means. Noise with mean zero is left out, because its mean changes nothing."""
        return _chain_of(tuple(stage.deterministic for stage in self.stages))


def _chain_of(stages: tuple[Parametrization, ...]) -> Parametrization:
    """Returns a chain of the given stages and chains. If there is only one stage in all, returns that stage."""
    chain = Chain(stages)
    return chain.stages[0] if len(chain) == 1 else chain


def from_json(text: str) -> Parametrization:
    """Rebuilds the parametrization that ``to_json`` wrote as ``text``.

    Raises:
      ValueError: If the text does not come from ``to_json``, names a stage that is not defined, passes wrong arguments
        to a stage, or names a function that is not public in ``jax.numpy``, ``jax.nn``, ``jax.lax`` or ``jax.scipy``.
        Nothing else is imported.

    A text from an untrusted source cannot run code, but it can use unlimited time or memory: a regular expression with
    nested repetitions can take years to match, and a large rank or count can exceed the memory. Read such a text
    first, or load it in a process that you can kill.

    Example:
      >>> import reparax as rpx
      >>> rpx.from_json((rpx.WeightNorm(axis=0) >> rpx.VarNoise(0.1)).to_json())
      WeightNorm(axis=0) >> VarNoise(0.1)
    """
    stages = load_stages(text)
    for stage in stages:
        if not isinstance(stage, Parametrization):
            raise ValueError(
                f"from_json expected a list of stages, but found {stage!r} in it. Pass it as an argument of a stage."
            )
    return stages[0] if len(stages) == 1 else Chain(tuple(stages))


def _stage_property(name: str) -> Any:
    """Returns a property of :class:`Mean` that reads the attribute ``name`` of the random stage."""
    return property(lambda self: getattr(self.stage, name))


class Mean(Parametrization):
    """The mean of a random stage, which replaces the stage in ``p.deterministic``.

    A mean replaces each :class:`Perturbation` that defines ``mean_leaf``, and each random :class:`Reparametrization`.
    It acts on the same arrays as the stage, and has the same raw values.

    Args:
      stage: A stage that draws random numbers.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class Jump(rpx.Perturbation):
      ...     rate: float
      ...     def apply_leaf(self, w, key):
      ...         return w + jax.random.bernoulli(key, self.rate, w.shape)
      ...     def mean_leaf(self, w):
      ...         return w + self.rate
      >>> p = Jump(0.25) >> rpx.VarNoise(0.1)
      >>> p.deterministic
      Mean(Jump(0.25))
      >>> p.fold({"w": jnp.ones(2)})["w"]
      Array([1.25, 1.25], dtype=float32)
    """

    stage: Parametrization

    changes_type: ClassVar[Any] = _stage_property("changes_type")
    straight_through: ClassVar[Any] = _stage_property("straight_through")
    moves_weights: ClassVar[Any] = _stage_property("moves_weights")
    random_init: ClassVar[Any] = _stage_property("random_init")
    update_reads: ClassVar[Any] = _stage_property("update_reads")
    _unwrapped: ClassVar[Any] = _stage_property("_unwrapped")

    def __post_init__(self) -> None:
        """Raises a TypeError unless ``stage`` is random, and copies its ``kind``, its name in raw trees."""
        stage: Any = self.stage
        if not (isinstance(stage, Parametrization) and stage.stochastic):
            raise TypeError(
                f"Mean takes a stage that draws random numbers and defines a mean, but got {stage!r}. Leave out `Mean`."
            )

        object.__setattr__(self, "kind", stage.kind)  # The markers in the raw tree are those of the stage.

    def sites(self, method: str, tree: Flat) -> list[Site]:
        """Returns the sites of the random stage; a plan computes its mean by calling its formulas without a key."""
        return self.stage.sites(method, tree)
