"""Parametrizations and their composition."""

import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, overload

import jax

from reparax._axes.boxes import gather_boxes, spread_boxes, spread_like
from reparax._axes.origin import Origins, probe
from reparax._axes.seen import ANY, Seen
from reparax._axes.shardings import AnyMesh, shardings_of_raw
from reparax._core.config import dump_stages, expression
from reparax._core.keys import Keys, check_key
from reparax._core.layers import Layer
from reparax._core.plan import ON_TREES, TreeLayer, open_all
from reparax._core.recompute import recompute
from reparax._core.sights import by_place
from reparax._core.value import Static
from reparax._core.verbs import advanced, closed, followed, opened, rebased, total_log_det, total_penalty
from reparax._tree.differences import abstract, require_no_differences
from reparax._tree.flat import Flat, flatten, nest
from reparax._tree.paths import PyTree
from reparax._tree.raw import OTHER_CHAIN, kind_of, outer_markers, resolve_owners


class Parametrization(Static, ABC):
    """A pure map from a raw tree to an effective tree, with a right inverse.

    ``init`` makes the raw tree, which an optimizer moves, from the model's parameters. ``apply`` makes the effective
    tree, which the model reads, from the raw tree: ``apply(init(params)) == params`` for every ``params`` in the
    image. ``update`` advances the fixed values once per step. All three are pure functions and work under
    ``jax.jit``, ``jax.vmap`` and ``jax.eval_shape``.

    Subclasses become frozen dataclasses without a decorator: hashable, comparable, picklable, static to JAX, with a
    ``repr`` that builds them. Most stages derive from :class:`Reparametrization` or :class:`Perturbation`. If your
    stage must see the whole tree, derive from this class and write ``init_tree`` and ``apply_tree``. You may write
    ``init`` and ``apply`` themselves instead; then none of their checks run.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class UnitTree(rpx.Parametrization):  # all arrays together have norm one
      ...     def init_tree(self, tree, keys):
      ...         return tree
      ...     def apply_tree(self, tree, keys):
      ...         length = jnp.sqrt(sum(jnp.sum(w * w) for w in jax.tree.leaves(tree)))
      ...         return jax.tree.map(lambda w: w / length, tree)
      >>> UnitTree().apply({"a": jnp.ones(1), "b": jnp.ones(3)})
      {'a': Array([0.5], dtype=float32), 'b': Array([0.5, 0.5, 0.5], dtype=float32)}
    """

    stochastic: ClassVar[bool] = False
    """Whether ``apply`` draws random numbers, so that it needs a key."""
    changes_type: ClassVar[bool] = False
    """Whether the stage may change the shape or dtype of the model's arrays."""
    straight_through: ClassVar[bool] = False
    """Whether the gradient is not that of the formula, as when rounding passes the gradient of the identity."""

    moves_weights: ClassVar[bool] = False
    """Whether ``update`` also changes values that train, as when pruned weights restart at zero."""

    _for_users: ClassVar[tuple[str, ...]] = (
        *("init", "apply", "update", "rebase", "fold"),
        *("deterministic", "stochastic", "check", "owners", "shardings", "to_json", "penalty", "log_det"),
    )
    """The names that users call; all other names are for authors of stages."""

    def __dir__(self) -> list[str]:
        """The names that users call, the stage's arguments, and what third-party classes add."""
        ours = {c: c.__module__.partition(".")[0] == __name__.partition(".")[0] for c in type(self).__mro__}
        known = {name for c, own in ours.items() if own for name in vars(c)}
        added = {name for c, own in ours.items() if not own for name in vars(c)} - known
        shown = {*self._for_users, *(each.name for each in dataclasses.fields(self)), *added}
        return [name for name in super().__dir__() if name in shown or name.startswith("_")]

    def init(self, params: PyTree, key: jax.Array | None = None, *, seen: PyTree = None) -> PyTree:
        """The raw tree whose effective tree is ``params``.

        Arrays that no stage replaces are the same objects as in ``params``, so donating the raw tree deletes them in
        ``params`` too. If you need ``params`` later, copy: ``raw = jax.tree.map(jnp.copy, p.init(params))``.

        Args:
          params: The model's parameters.
          key: A typed or legacy PRNG key; required if ``random_start`` is true, as for :class:`LoRA`.
          seen: What each array is multiplied with, as :func:`inputs` finds it, for stages that start from data; for
            several kinds of moments a tuple of such trees. Each stage gets the entry of its own array. Stages behind
            it in the chain pass it on for main values that have the axes of their array.
        """
        if key is None and self.random_start:
            raise ValueError(
                f"{call(self, 'init')} draws random numbers, so it needs a key, but got key=None. Pass a key: "
                f"`p.init(params, jax.random.key(0))`."
            )
        if marks := outer_markers(params):
            path, mark = next(iter(marks.items()))
            raise ValueError(
                f"{call(self, 'init')} takes the model's own parameters, but got a raw tree: it holds {mark!r} at "
                f"{path!r}. Call `init` once, with the whole chain, and pass its result to `apply`."
            )
        checked, tree = _checked_key(self, "init", jax.random.key(0) if key is None else key), flatten(params)
        sights = by_place(call(self, "init"), tree, seen)
        return spread_boxes(
            functools.partial(followed, self._parts),
            params,
            nest(open_all(self._parts, tree, Keys(checked), sights)),
        )

    def apply(self, raw: PyTree, key: jax.Array | None = None) -> PyTree:
        """The effective tree of ``raw``.

        Args:
          raw: The result of ``init``, or that after steps of an optimizer.
          key: A typed or legacy PRNG key; required if ``stochastic`` is true, otherwise not used.
        """
        effective = recompute(functools.partial(closed, self._parts), gather_boxes(raw), _needed_key(self, key))
        if marks := outer_markers(effective):
            path, mark = next(iter(marks.items()))
            if kind_of(mark) in [stage.kind for stage in _stages(self)]:
                raise ValueError(
                    f"{call(self, 'apply')} does not select {path!r}, where the raw tree holds {mark!r}: another chain "
                    f"or an older version of reparax made it. Convert it with `rpx.transfer(old, new, raw)`."
                )
            raise ValueError(f"{call(self, 'apply')} does not know {mark!r} at {path!r}: {OTHER_CHAIN}")
        return effective

    def update(self, raw: PyTree, key: jax.Array | None = None, grads: PyTree = None) -> PyTree:
        """``raw`` with its fixed values advanced by one training step.

        Free values do not change, except under :class:`RigL` and :class:`SET`, where regrown weights start at zero.

        Args:
          raw: The result of ``init``, or that after steps of an optimizer.
          key: For stages that draw random numbers, such as :class:`SET`. Without a key they do nothing.
          grads: For stages that read gradients, such as :class:`RigL`: the gradient of the loss with respect to the
            effective tree, ``jax.grad(loss)(p.fold(raw))``. Each stage receives the gradient of its own weights.
            Without ``grads`` these stages do nothing.
        """
        keys = Keys(_checked_key(self, "update", key))
        slopes = None if grads is None else gather_boxes(grads)
        tree = advanced(call(self, "update"), self._parts, flatten(gather_boxes(raw)), keys, slopes)
        return spread_like(raw, nest(tree))

    def rebase(self, raw: PyTree) -> PyTree:
        """``raw`` with each stage's base moved to the current point, and the values relative to the base set to zero.

        The effective tree does not change. An optimizer's momentum for these values belongs to the old base: for the
        new base, the same numbers mean another direction. Restart the optimizer with
        ``tx.init(raw)``, or rebase rarely.
        """
        return spread_like(raw, nest(rebased(self._parts, flatten(gather_boxes(raw)))))

    def penalty(self, raw: PyTree) -> jax.Array:
        """The sum of the penalties of all stages, to add to the loss: a scalar, float32 or wider.

        A penalty is a divergence from a prior, an expected number of weights, or a distance from the base. Each
        stage computes its own from its raw values, without the noise of earlier stages. With no penalties it is 0.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> p = rpx.Gaussian(std=1.0, prior=1.0)
          >>> p.penalty(p.init({"w": jnp.ones(4)}))  # half the square of each mean
          Array(2., dtype=float32)
        """
        return total_penalty(self._parts, flatten(gather_boxes(raw)))

    def log_det(self, raw: PyTree) -> jax.Array:
        r"""The log-determinant of the Jacobian, :math:`\log |\det \partial w / \partial x|`, in float32 or wider.

        It turns a log-density of effective weights :math:`w` into one of raw values :math:`x`: for Hamiltonian Monte
        Carlo on ``raw``, use ``log_prior(p.fold(raw)) + p.log_det(raw)``. Each stage must be a bijection of its
        values. A :class:`Simplex`, which has one raw value too many, adds the density of a number that the weights do
        not tell. Noise is replaced by its mean, and frozen values do not count.

        Raises:
          ValueError: If a stage is not a bijection; the error names it.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> p = rpx.Positive("exp")
          >>> p.log_det(p.init({"w": jnp.exp(jnp.array([1.0, 2.0]))}))  # the sum of the raw values
          Array(3., dtype=float32)
        """
        return total_log_det(self._parts, flatten(gather_boxes(raw)))

    @property
    def advances(self) -> bool:
        """Whether ``update`` does anything."""
        return self._has("update")

    @property
    def random_start(self) -> bool:
        """Whether another key gives ``init`` another model to train, so that it needs one."""
        return False

    _sees: ClassVar[bool] = False
    """Whether ``init`` of the stage takes what arrays are multiplied with."""

    # What follows is for the plan of a chain. A stage on the whole tree needs none of it.
    @property
    def _parts(self) -> "tuple[Parametrization, ...]":
        """The stages, of which a stage alone is one."""
        return (self,)

    _sees_tree: ClassVar[Any] = True
    """Whether the stage takes whole trees, not arrays at sites of their own."""

    @property
    def _asks_functions(self) -> bool:
        """Whether the sites depend on functions, whose answers may change."""
        return False

    def _has(self, verb: str) -> bool:
        """Whether the stage does anything in ``update``, ``rebase`` or ``log_det``."""
        return overrides(self, f"{verb}_tree") or (verb != "log_det" and overrides(self, verb))

    @property
    def _reads_grads(self) -> bool:
        """Whether ``update`` takes the gradient with respect to the stage's output."""
        update = getattr(self, "update_tree", None)
        return update is not None and "grads" in inspect.signature(update).parameters

    def _opening(self, tree: Flat) -> Layer:
        """Where ``init`` replaces arrays of ``tree``, which may hold markers of later stages."""
        del tree
        return self._on_tree

    def _closing(self, method: str, tree: Flat) -> Layer:
        """Where ``apply`` and the other verbs find raw values of this stage in ``tree``, which is of types."""
        del method, tree
        return self._on_tree

    @property
    def _on_tree(self) -> TreeLayer:
        return TreeLayer(self, public=[verb for verb in ("init", "apply", "update", "rebase") if overrides(self, verb)])

    def _follow(self, tree: PyTree) -> tuple[PyTree, Origins]:
        """The shapes of ``init(tree)``, and for each of their axes the axis of ``tree`` that it follows."""
        init = functools.partial(opened, self._parts)
        return abstract(init, tree), probe(init, tree)

    @property
    def deterministic(self) -> "Parametrization":
        """The chain without randomness, for evaluation and export; each random stage is replaced by its mean."""
        if self.stochastic:
            raise TypeError(f"{self!r} draws random numbers, but does not define its mean. Define `deterministic`.")
        return self

    def owners(self, params: PyTree) -> dict[str, str]:
        """For each array of ``params``, the path at which the raw tree holds its value.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> rpx.Tie({"out": "in"}).owners({"in": jnp.ones(2), "out": jnp.ones(2)})
          {'in': 'in', 'out': 'in'}
        """
        tree = flatten(abstract(lambda x: x, params))
        owners = {slot.path: slot.path for slot in tree.slots().values()}
        for stage in reversed(_stages(self)):
            owners = resolve_owners(owners, stage._sources(tree))
            tree = flatten(abstract(functools.partial(opened, (stage,)), nest(tree)))
        return owners

    def _sources(self, tree: Flat) -> dict[str, str]:
        """For each array without a value of its own, the path of the array that it copies."""
        del tree
        return {}

    def fold(self, raw: PyTree) -> PyTree:
        """Plain parameters for evaluation and export: ``p.deterministic.apply(raw)``."""
        return self.deterministic.apply(raw)

    def __rshift__(self, later: object) -> "Parametrization":
        if not isinstance(later, Parametrization):
            return NotImplemented
        return compose((self, later))

    def __repr__(self) -> str:
        return expression(self)

    def to_json(self) -> str:
        """The configuration as JSON, to store beside a checkpoint; :func:`from_json` reads it."""
        of_one = isinstance(self, Chain) and len(self) == 1  # it is not equal to the stage itself
        return dump_stages((self,) if of_one else _stages(self))

    def check(self, raw: PyTree, like: PyTree) -> None:
        """Checks that a raw tree, such as a restored checkpoint, has the stages, shapes and dtypes of ``init(like)``.

        Args:
          raw: The raw tree to check.
          like: The model's parameters, or their shapes and dtypes.

        Raises:
          ValueError: If it differs; the error names each path that is missing, unexpected, or has another shape,
            dtype or stage.
        """
        require_no_differences(call(self, "check"), raw, like, with_any_key(self.init))

    def shardings(
        self, specs: PyTree, mesh: AnyMesh, like: PyTree | None = None, *, memory: str | None = None
    ) -> PyTree:
        """The shardings of the raw tree: each axis is sharded like the parameter axis that it follows.

        A raw axis is not sharded if it follows none, or if the mesh axes do not divide it; an axis of a parameter that
        they do not divide is an error. Nothing is computed: each stage is traced a few times for each type of array.

        Args:
          specs: A PartitionSpec (or NamedSharding) for each of the model's parameters; or arrays placed on a mesh.
          mesh: The mesh.
          like: The model's parameters, or their shapes and dtypes; not needed if ``specs`` are arrays.
          memory: The kind of memory of fixed values, such as ``"pinned_host"`` for the frozen base of an adapter; all
            others lie on the device. Before ``apply``, a jitted step moves them there:
            ``jax.device_put(raw, p.shardings(specs, mesh, like))``.

        Example:
          >>> import jax, jax.numpy as jnp, reparax as rpx
          >>> from jax.sharding import AbstractMesh, PartitionSpec
          >>> mesh, specs = AbstractMesh((2, 4), ("data", "model")), {"w": PartitionSpec("data", "model")}
          >>> shardings = rpx.WeightNorm().shardings(specs, mesh, like={"w": jnp.ones((8, 16))})
          >>> jax.tree.map(lambda sharding: sharding.spec, shardings)
          {'w': {'@weight_norm': {'g': P(None, 'model'), 'v': P('data', 'model')}}}
        """
        follow = functools.partial(followed, self._parts)
        return shardings_of_raw(call(self, "shardings"), with_any_key(self.init), follow, specs, mesh, like, memory)


class AtSites(Parametrization):
    """A stage that acts at sites of its own, each of one array or of several, and not on the whole tree."""

    _sees_tree: ClassVar[Any] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if on_tree := [name for name in ON_TREES if hasattr(cls, name)]:
            raise TypeError(
                f"{cls.__name__} defines {on_tree[0]}, but acts on arrays at places of their own. Write its formulas, "
                f"or another stage, on the whole tree, beside it in the chain: a `rpx.Parametrization`."
            )

    @abstractmethod
    def _opening(self, tree: Flat) -> Layer: ...

    @abstractmethod
    def _closing(self, method: str, tree: Flat) -> Layer: ...


class Chain(Parametrization):
    """Stages in order, as built by ``a >> b``: the first acts on the raw values. ``Chain()`` is the identity.

    A chain keeps the stages as you wrote them: ``len(p)``, ``p[0]``, ``p[1:]`` and loops work.

    Args:
      stages: The stages. A chain among them is replaced by its stages.

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
    random_start: ClassVar[Any] = property(lambda self: any(stage.random_start for stage in self.stages))
    advances: ClassVar[Any] = property(lambda self: any(stage.advances for stage in self.stages))

    def __post_init__(self) -> None:
        got: Any = self.stages
        if not isinstance(got, tuple):
            raise TypeError(f"Chain takes a tuple of parametrizations, but got {got!r} of type {type(got).__name__}.")
        object.__setattr__(self, "stages", tuple(stage for part in self.stages for stage in _stages(part)))

    def __repr__(self) -> str:
        if len(self.stages) > 1:
            return " >> ".join(map(repr, self.stages))
        return f"Chain({self.stages!r})" if self.stages else "Chain()"

    def __len__(self) -> int:
        return len(self.stages)

    def __bool__(self) -> bool:
        return True  # also for the identity, whose length is 0

    def __iter__(self) -> Iterator[Parametrization]:
        return iter(self.stages)

    @overload
    def __getitem__(self, i: int) -> Parametrization: ...
    @overload
    def __getitem__(self, i: slice) -> "Chain": ...
    def __getitem__(self, i: int | slice) -> Parametrization:
        return Chain(self.stages[i]) if isinstance(i, slice) else self.stages[i]

    @property
    def _parts(self) -> tuple[Parametrization, ...]:
        return self.stages

    def _has(self, verb: str) -> bool:
        return any(stage._has(verb) for stage in self.stages)

    @property
    def deterministic(self) -> Parametrization:
        return compose(tuple(stage.deterministic for stage in self.stages))


def _stages(part: object) -> tuple[Parametrization, ...]:
    if not isinstance(part, Parametrization):
        raise TypeError(f"Chain takes parametrizations, but got {part!r} of type {type(part).__name__}.")
    return part.stages if isinstance(part, Chain) else (part,)


def compose(stages: tuple[Parametrization, ...]) -> Parametrization:
    """The chain of ``stages``; a single stage itself."""
    chain = Chain(stages)
    return chain.stages[0] if len(chain) == 1 else chain


def overrides(stage: Parametrization, *methods: str) -> bool:
    """Whether the class of a stage defines one of these methods itself."""
    return any(getattr(type(stage), method, None) is not getattr(Parametrization, method, None) for method in methods)


def with_any_key(init: Callable[..., PyTree]) -> Callable[[PyTree], PyTree]:
    """``init`` where only the structure of its result, or its nearest point, matters."""
    return functools.partial(init, key=jax.random.key(0), **any_data(init))


def any_data(init: Callable[..., PyTree]) -> dict[str, Seen]:
    """The argument of ``init`` that stands for any data; a class may write its own init without it."""
    return {"seen": ANY} if "seen" in inspect.signature(init).parameters else {}


def require_chains(usage: str, *got: object) -> None:
    """Requires the arguments with which ``usage``, a call, begins to be parametrizations."""
    if others := [type(x).__name__ for x in got if not isinstance(x, Parametrization)]:
        name = usage.partition("(")[0]
        raise TypeError(f"{name} takes parametrizations first, but got {others[0]}. Write `rpx.{usage}`.")


def call(p: Parametrization, method: str) -> str:
    """The name of a call in error messages: ``VarNoise(0.1).apply``, ``(a >> b).apply``."""
    text = " >> ".join(map(repr, _stages(p))) or repr(p)
    return f"({text}).{method}" if len(_stages(p)) > 1 else f"{text}.{method}"


def _checked_key(p: Parametrization, method: str, key: jax.Array | None) -> jax.Array | None:
    """``key`` as a typed scalar key; None stays None."""
    tree = "params" if method == "init" else "raw"
    in_batches = f"jax.vmap(p.{method}, in_axes=(None, 0))({tree}, keys)"
    return None if key is None else check_key(key, call(p, method), in_batches)


def _needed_key(p: Parametrization, key: jax.Array | None) -> jax.Array | None:
    """The key of ``apply``; None if nothing is random."""
    if not p.stochastic:
        return None
    if key is None:
        raise ValueError(
            f"{call(p, 'apply')} draws random numbers, so it needs a key, but got key=None. "
            f"Pass a key, or evaluate with `p.deterministic`."
        )
    return _checked_key(p, "apply", key)
