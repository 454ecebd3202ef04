"""The algebra: what a parametrization is, and how two of them compose."""

import dataclasses
import functools
from abc import ABC
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, overload

import jax
import jax.numpy as jnp

from reparax._axes.boxes import gather_boxes, spread_boxes, spread_like
from reparax._axes.origin import Origins, compose_origins, keep_origins, probe
from reparax._axes.shardings import AnyMesh, shardings_of_raw
from reparax._core.config import dump_stages, expression
from reparax._core.keys import Keys, check_key
from reparax._core.pending import settle
from reparax._core.pullback import pull_back
from reparax._core.recompute import recompute
from reparax._core.value import Static
from reparax._numerics.arithmetic import add_up
from reparax._tree.differences import abstract, require_no_differences
from reparax._tree.paths import PyTree, is_array
from reparax._tree.raw import OTHER_CHAIN, flatten_slots, graft, kind_of, outer_markers, resolve_owners


class Parametrization(Static, ABC):
    """A pure map from a raw tree to an effective tree, with a right inverse.

    ``init`` takes the model's parameters to the raw tree that an optimizer moves; ``apply`` takes the raw tree to
    the effective tree that the model reads, with ``apply(init(params)) == params`` for every ``params`` on the
    image; ``update`` advances the fixed values once a step. All three are pure, and work under ``jax.jit``,
    ``jax.vmap`` and ``jax.eval_shape``.

    Subclasses become frozen dataclasses on their own, without a decorator: hashable, comparable, picklable, static
    to JAX, with a ``repr`` that builds them. Most stages are a :class:`Reparametrization` or a
    :class:`Perturbation`; a stage that must see the whole tree derives from this class and writes ``init_tree`` and
    ``apply_tree``, or the two public methods themselves, where it needs none of their checks.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class UnitTree(rpx.Parametrization):  # all arrays together have length one
      ...     def init_tree(self, tree, keys):
      ...         return tree
      ...     def apply_tree(self, tree, keys):
      ...         length = jnp.sqrt(sum(jnp.sum(w * w) for w in jax.tree.leaves(tree)))
      ...         return jax.tree.map(lambda w: w / length, tree)
      >>> UnitTree().apply({"a": jnp.ones(1), "b": jnp.ones(3)})
      {'a': Array([0.5], dtype=float32), 'b': Array([0.5, 0.5, 0.5], dtype=float32)}
    """

    stochastic: ClassVar[bool] = False
    """Whether ``apply`` draws random numbers, and so needs a key."""
    changes_type: ClassVar[bool] = False
    """Whether the stage exists to give effective arrays another shape or dtype than the model's."""
    straight_through: ClassVar[bool] = False
    """Whether the stage has a gradient of its own, as a rounding has the identity's, and not that of its formula."""

    moves_weights: ClassVar[bool] = False
    """Whether ``update`` gives values that train other numbers too, as where weights begin anew."""

    draws_late: ClassVar[bool] = False
    """Whether noise of earlier stages may wait on arrays that the stage does not act on; else it is drawn before."""

    _for_users: ClassVar[tuple[str, ...]] = (
        *("init", "apply", "update", "rebase", "fold"),
        *("deterministic", "stochastic", "check", "owners", "shardings", "to_json", "penalty", "log_det"),
    )
    """The names that users call; all others are for authors of stages."""

    def __dir__(self) -> list[str]:
        """What you meet on a stage: what users call, its arguments, and what a third party's class adds to them."""
        ours = {c: c.__module__.partition(".")[0] == __name__.partition(".")[0] for c in type(self).__mro__}
        known = {name for c, own in ours.items() if own for name in vars(c)}
        added = {name for c, own in ours.items() if not own for name in vars(c)} - known
        shown = {*self._for_users, *(each.name for each in dataclasses.fields(self)), *added}
        return [name for name in super().__dir__() if name in shown or name.startswith("_")]

    def init(self, params: PyTree, key: jax.Array | None = None) -> PyTree:
        """The raw tree whose effective tree is ``params``.

        Arrays that no stage replaces are those of ``params`` itself, so donating the raw tree would delete them. Who
        needs them afterwards starts from a copy, ``raw = jax.tree.map(jnp.copy, p.init(params))``.

        Args:
          params: The model's parameters.
          key: For stages that draw their start; without one, ``jax.random.key(0)`` serves.
        """
        if marks := outer_markers(params):
            path, mark = next(iter(marks.items()))
            raise ValueError(
                f"{call(self, 'init')} takes the model's own parameters, but got a raw tree: it holds {mark!r} at "
                f"{path!r}. Call `init` once, with the whole chain, and pass its result to `apply`."
            )
        raw = self.init_tree(params, Keys(_checked_key(self, "init", jax.random.key(0) if key is None else key)))
        return spread_boxes(self._follow, params, raw)

    def apply(self, raw: PyTree, key: jax.Array | None = None) -> PyTree:
        """The effective tree of ``raw``.

        Args:
          raw: What ``init`` made, or an optimizer made of it.
          key: A typed or legacy PRNG key; needed exactly where ``stochastic`` is true.
        """
        effective = recompute(self._run, gather_boxes(raw), self._needed(key))
        if marks := outer_markers(effective):
            path, mark = next(iter(marks.items()))
            if kind_of(mark) in [stage.kind for stage in _stages(self)]:
                raise ValueError(
                    f"{call(self, 'apply')} does not select {path!r}, where the raw tree holds {mark!r}: another chain "
                    f"made it, or one whose default took biases too. Carry it over by `rpx.transfer(raw, old, new)`."
                )
            raise ValueError(f"{call(self, 'apply')} does not know {mark!r} at {path!r}: {OTHER_CHAIN}")
        return effective

    def update(self, raw: PyTree, key: jax.Array | None = None, grads: PyTree = None) -> PyTree:
        """``raw`` with its fixed values advanced by one training step.

        Free values are left alone, but by :class:`RigL` and :class:`SET`, under which new weights begin at zero.

        Args:
          raw: What ``init`` made, or an optimizer made of it.
          key: For stages that draw, such as :class:`SET`. Without one they stay as they are.
          grads: For stages that read gradients, such as :class:`RigL`: those of the loss by the effective tree,
            ``jax.grad(loss)(p.fold(raw))``. Each stage sees those by its own weights. Without them it stays as it is.
        """
        keys, tree = Keys(_checked_key(self, "update", key)), gather_boxes(raw)
        slopes = None if grads is None else gather_boxes(grads)
        for i, stage in enumerate(_stages(self)):
            if stage.advances:
                seen = self._before(i, tree)
                read = (self._grads_at(i, seen, slopes),) if stage.reads_grads else ()
                tree = graft("update", tree, seen, stage.update_tree(seen, keys, *read), free=stage.moves_weights)
        return spread_like(raw, tree)

    def rebase(self, raw: PyTree) -> PyTree:
        """``raw`` with each stage's base at the current point, and the values that lead there from it at zero.

        The effective tree stays the same. Momentum that an optimizer holds for these values is that of the old base,
        where the same numbers mean another direction: set it to zero, or rebase seldom.
        """
        tree = gather_boxes(raw)
        for i, stage in enumerate(_stages(self)):
            if stage.has_base:
                seen = self._before(i, tree)
                tree = graft("rebase", tree, seen, stage.rebase_tree(seen), free=True)
        return spread_like(raw, tree)

    def penalty(self, raw: PyTree) -> jax.Array:
        """What the stages add to the loss: a scalar, in float32 at least.

        Each stage that says a penalty says it of the raw values that it sees, those of earlier stages without noise:
        a divergence from a prior, an expected number of weights, a distance from the base. Without any it is 0.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> p = rpx.Gaussian(std=1.0, prior=1.0)
          >>> p.penalty(p.init({"w": jnp.ones(4)}))  # half the square of each mean
          Array(2., dtype=float32)
        """
        return self._sum(raw, lambda stage, tree: stage.penalty_tree(tree))

    def log_det(self, raw: PyTree) -> jax.Array:
        r"""The logarithm of the volume that the chain makes of a volume of raw values, in float32 at least.

        It is :math:`\log |\det \partial w / \partial x|`, by which a density of effective weights becomes one of
        raw values: ``log_prior(p.fold(raw)) + p.log_det(raw)`` is what Hamiltonian Monte Carlo moves ``raw`` by. Stages
        must be bijections, each on the values that it sees; noise counts as its mean, frozen values do not count.

        Raises:
          ValueError: Naming a stage that is no bijection.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> p = rpx.Positive("exp")
          >>> p.log_det(p.init({"w": jnp.exp(jnp.array([1.0, 2.0]))}))  # the sum of the raw values
          Array(3., dtype=float32)
        """
        leaves, slots, _ = flatten_slots(gather_boxes(raw))
        places = [slot.place for x, slot in zip(leaves, slots, strict=True) if is_array(x) and not slot.fixed]

        def is_free(place: str) -> bool:
            return any(each == place or each.startswith(f"{place}/") for each in places)

        return self._sum(raw, lambda stage, tree: stage.log_det_tree(tree, is_free))

    def _sum(self, raw: PyTree, of: "Callable[[Parametrization, PyTree], jax.Array]") -> jax.Array:
        """What the stages say of the trees that they see, added up."""
        tree, said = gather_boxes(raw), list[jax.Array]()
        for stage in _stages(self.deterministic):
            said.append(of(stage, tree))
            tree = stage.apply_tree(tree, Keys(None))
        return add_up(said)

    @property
    def advances(self) -> bool:
        """Whether ``update`` does anything."""
        return overrides(self, "update", "update_tree")

    @property
    def has_base(self) -> bool:
        """Whether ``rebase`` does anything."""
        return overrides(self, "rebase", "rebase_tree")

    @property
    def reads_grads(self) -> bool:
        """Whether ``update_tree`` takes gradients, by the tree that the stage makes, where ``update`` is given any."""
        return False

    # What a chain calls, and a stage writes: on a tree in which other stages have left their markers, which it hands
    # on. A stage that writes a public method instead has none of that method's checks when it stands alone.
    def init_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        """The tree that this stage makes of one that later stages made; ``keys.of_stage(self.kind)`` is its key."""
        return self._public("init")(tree, keys.of_stage(self.kind))

    def apply_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        """The tree that later stages see, of one that earlier stages made."""
        return self._public("apply")(tree, keys.of_stage(self.kind))

    def update_tree(self, tree: PyTree, keys: Keys, grads: PyTree = None) -> PyTree:
        """The tree with this stage's fixed values advanced."""
        del grads
        return self._public("update")(tree, keys.of_stage(self.kind))

    def rebase_tree(self, tree: PyTree) -> PyTree:
        """The tree with this stage's base at the current point."""
        return self._public("rebase")(tree)

    def mean_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        """The mean of ``apply_tree`` over all keys of this stage: what :class:`Mean` calls."""
        del tree, keys
        raise TypeError(f"{self!r} draws random numbers, but does not say what its mean is. Define `deterministic`.")

    def penalty_tree(self, tree: PyTree) -> jax.Array:
        """What this stage adds to the loss, of the tree that earlier stages made."""
        del tree
        return jnp.zeros((), jnp.float32)

    def log_det_tree(self, tree: PyTree, is_free: Callable[[str], bool]) -> jax.Array:
        """The logarithm of this stage's own volume, of the tree that earlier stages made, at the places that train."""
        del tree, is_free
        raise ValueError(
            f"{self!r}.log_det: the stage is no bijection, so volumes of raw and of effective values cannot be "
            f"compared. Take a chain of bijections, such as Positive, Bounded, Scale, Simplex, PositiveDefinite or "
            f"Triangular."
        )

    def _public(self, method: str) -> Callable[..., PyTree]:
        """A public method that the stage writes itself."""
        if not overrides(self, method):
            raise TypeError(f"{type(self).__name__} defines neither {method}_tree nor {method}. Define one.")
        return getattr(self, method)

    def _run(self, tree: PyTree, key: jax.Array | None) -> PyTree:
        keys = Keys(key)
        return settle(self.apply_tree(tree, keys), keys)

    def _needed(self, key: jax.Array | None) -> jax.Array | None:
        """The key of ``apply``; None where nothing is drawn."""
        if not self.stochastic:
            return None
        if key is None:
            raise ValueError(
                f"{call(self, 'apply')} draws random numbers, so it needs a key, but got key=None. "
                f"Pass a key, or evaluate with `p.deterministic`."
            )
        return _checked_key(self, "apply", key)

    def _before(self, i: int, tree: PyTree) -> PyTree:
        """What the stage number ``i`` sees of a raw tree, without noise."""
        return Chain(_stages(self)[:i]).deterministic.apply_tree(tree, Keys(None))

    def _grads_at(self, i: int, seen: PyTree, grads: PyTree) -> PyTree:
        """The gradients by what the stage number ``i`` makes of ``seen``, of those by the effective tree, if any."""
        if grads is None:
            return None
        own, later = _stages(self)[i].deterministic, Chain(_stages(self)[i + 1 :]).deterministic
        tree = own.apply_tree(seen, Keys(None))
        return pull_back(call(self, "update"), lambda tree: later.apply_tree(tree, Keys(None)), tree, grads)

    def _follow(self, tree: PyTree) -> tuple[PyTree, Origins]:
        """The shapes that ``init`` makes of ``tree``, and which axes of it theirs follow."""
        init = functools.partial(self.init_tree, keys=Keys(None))
        return abstract(init, tree), probe(init, tree)

    @property
    def deterministic(self) -> "Parametrization":
        """The same chain without randomness, to evaluate, fold and export with; each random stage becomes its mean."""
        if self.stochastic:
            raise TypeError(
                f"{self!r} draws random numbers, but does not say what its mean is. Define `deterministic`."
            )
        return self

    def owners(self, params: PyTree) -> dict[str, str]:
        """Who owns what: for each array of ``params``, the path under which its value stands in the raw tree.

        Example:
          >>> import jax.numpy as jnp, reparax as rpx
          >>> rpx.Tie({"out": "in"}).owners({"in": jnp.ones(2), "out": jnp.ones(2)})
          {'in': 'in', 'out': 'in'}
        """
        tree = abstract(lambda x: x, params)
        owners = {slot.path: slot.path for slot in flatten_slots(tree)[1]}
        for stage in reversed(_stages(self)):
            owners = resolve_owners(owners, stage._sources(tree))
            tree = abstract(functools.partial(stage.init_tree, keys=Keys(None)), tree)
        return owners

    def _sources(self, tree: PyTree) -> dict[str, str]:
        """For each array that holds no value of its own, the path of the one that it takes it from."""
        del tree
        return {}

    def fold(self, raw: PyTree) -> PyTree:
        """Plain parameters for export: ``p.deterministic.apply(raw)``."""
        return self.deterministic.apply(raw)

    def __rshift__(self, later: object) -> "Parametrization":
        if not isinstance(later, Parametrization):
            return NotImplemented
        return compose((self, later))

    def __repr__(self) -> str:
        return expression(self)

    def to_json(self) -> str:
        """The configuration as JSON, to lie beside a checkpoint; :func:`from_json` reads it."""
        of_one = isinstance(self, Chain) and len(self) == 1  # which is not the stage itself
        return dump_stages((self,) if of_one else _stages(self))

    def check(self, raw: PyTree, like: PyTree) -> None:
        """Compares a raw tree, such as a restored checkpoint, with what ``init`` would make of ``like``.

        Args:
          raw: The raw tree to check.
          like: The model's parameters, or their shapes and dtypes.

        Raises:
          ValueError: Naming every path that is missing, unexpected, or of another shape, dtype or stage.
        """
        require_no_differences(call(self, "check"), raw, like, self.init)

    def shardings(self, specs: PyTree, mesh: AnyMesh, like: PyTree | None = None) -> PyTree:
        """The shardings of the raw tree: each axis is cut as the axis of its parameter is that it follows.

        An axis that follows none, or that its mesh axes do not divide, stays whole. Nothing is computed: a stage
        is traced a few times for each type of array.

        Args:
          specs: A PartitionSpec (or NamedSharding) for each of the model's parameters; or arrays that lie on a mesh.
          mesh: The mesh.
          like: The model's parameters, or their shapes and dtypes; not needed where ``specs`` are arrays.

        Example:
          >>> import jax, jax.numpy as jnp, reparax as rpx
          >>> from jax.sharding import AbstractMesh, PartitionSpec
          >>> mesh, specs = AbstractMesh((2, 4), ("data", "model")), {"w": PartitionSpec("data", "model")}
          >>> shardings = rpx.WeightNorm().shardings(specs, mesh, like={"w": jnp.ones((8, 16))})
          >>> jax.tree.map(lambda sharding: sharding.spec, shardings)
          {'w': {'@weight_norm': {'g': P(None, 'model'), 'v': P('data', 'model')}}}
        """
        return shardings_of_raw(call(self, "shardings"), self.init, self._follow, specs, mesh, like)


class Chain(Parametrization):
    """Stages in a row, the first acts on the raw values first; what ``>>`` builds. ``Chain()`` is the identity.

    A chain holds the stages as you wrote them, one after the other: ``len(p)``, ``p[0]``, ``p[1:]`` and loops see them.

    Args:
      stages: The stages. The stages of chains among them stand in their place.

    Example:
      >>> import reparax as rpx
      >>> p = (rpx.WeightNorm() >> rpx.VarNoise(3.0)) >> rpx.VarNoise(4.0)
      >>> p
      WeightNorm() >> VarNoise(3.0) >> VarNoise(4.0)
      >>> len(p), p[0], p.deterministic
      (3, WeightNorm(), WeightNorm())
    """

    stages: tuple[Parametrization, ...] = ()

    def __post_init__(self) -> None:
        got: Any = self.stages
        if not isinstance(got, tuple):
            raise TypeError(f"Chain takes a tuple of parametrizations, but got {got!r} of type {type(got).__name__}.")
        object.__setattr__(self, "stages", tuple(stage for part in self.stages for stage in _stages(part)))
        object.__setattr__(self, "stochastic", any(stage.stochastic for stage in self.stages))
        object.__setattr__(self, "changes_type", any(stage.changes_type for stage in self.stages))
        object.__setattr__(self, "straight_through", any(stage.straight_through for stage in self.stages))

    def __repr__(self) -> str:
        if len(self.stages) > 1:
            return " >> ".join(map(repr, self.stages))
        return f"Chain({self.stages!r})" if self.stages else "Chain()"

    def __len__(self) -> int:
        return len(self.stages)

    def __bool__(self) -> bool:
        return True  # the identity is a parametrization too, though it has no stages

    def __iter__(self) -> Iterator[Parametrization]:
        return iter(self.stages)

    @overload
    def __getitem__(self, i: int) -> Parametrization: ...
    @overload
    def __getitem__(self, i: slice) -> "Chain": ...
    def __getitem__(self, i: int | slice) -> Parametrization:
        return Chain(self.stages[i]) if isinstance(i, slice) else self.stages[i]

    @property
    def advances(self) -> bool:
        return any(stage.advances for stage in self.stages)

    @property
    def reads_grads(self) -> bool:
        return any(stage.reads_grads for stage in self.stages)

    @property
    def has_base(self) -> bool:
        return any(stage.has_base for stage in self.stages)

    @property
    def deterministic(self) -> Parametrization:
        return compose(tuple(stage.deterministic for stage in self.stages))

    def init_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        for stage in reversed(self.stages):
            tree = stage.init_tree(tree, keys)
        return tree

    def _follow(self, tree: PyTree) -> tuple[PyTree, Origins]:
        origins = keep_origins(tree)
        for stage in reversed(self.stages):
            tree, own = stage._follow(tree)
            origins = compose_origins(own, origins)
        return tree, origins

    def apply_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        for stage in self.stages:
            tree = stage.apply_tree(tree if stage.draws_late else settle(tree, keys), keys)
        return tree


def _stages(part: object) -> tuple[Parametrization, ...]:
    if not isinstance(part, Parametrization):
        raise TypeError(f"Chain takes parametrizations, but got {part!r} of type {type(part).__name__}.")
    return part.stages if isinstance(part, Chain) else (part,)


def compose(stages: tuple[Parametrization, ...]) -> Parametrization:
    """The chain of ``stages``; the stage itself where there is only one."""
    chain = Chain(stages)
    return chain.stages[0] if len(chain) == 1 else chain


def overrides(stage: Parametrization, *methods: str) -> bool:
    """Whether the class of a stage writes one of these methods itself."""
    return any(getattr(type(stage), method) is not getattr(Parametrization, method) for method in methods)


def call(p: Parametrization, method: str) -> str:
    """How an error names the call it speaks of: ``VarNoise(0.1).apply``, ``(a >> b).apply``."""
    text = " >> ".join(map(repr, _stages(p))) or repr(p)
    return f"({text}).{method}" if len(_stages(p)) > 1 else f"{text}.{method}"


def _checked_key(p: Parametrization, method: str, key: jax.Array | None) -> jax.Array | None:
    """``key`` as a typed scalar key, None as None."""
    tree = "params" if method == "init" else "raw"
    in_batches = f"jax.vmap(p.{method}, in_axes=(None, 0))({tree}, keys)"
    return None if key is None else check_key(key, call(p, method), in_batches)
