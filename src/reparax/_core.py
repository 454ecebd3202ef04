"""The algebra: what a parametrization is, and how two of them compose."""

import functools
from abc import ABC, abstractmethod
from dataclasses import field
from typing import Any, ClassVar

import jax

from reparax import _boxes, _differences, _keys, _manifest, _raw, _recompute, _shardings
from reparax._paths import PyTree
from reparax._static import Static


class Parametrization(Static, ABC):
    """A pure map from a raw tree to an effective tree, with a right inverse.

    ``init`` takes the model's parameters to the raw tree that an optimizer moves; ``apply`` takes the raw tree to
    the effective tree that the model reads, with ``apply(init(params)) == params`` for every ``params`` on the
    image; ``update`` advances the fixed values once a step. All three are pure, and work under ``jax.jit``,
    ``jax.vmap`` and ``jax.eval_shape``.

    Subclasses become frozen dataclasses on their own, without a decorator: hashable, comparable, picklable, static
    to JAX, with a ``repr`` that builds them. Most stages are a :class:`Reparametrization` or a
    :class:`Perturbation`; a stage that must see the whole tree derives from this class and writes ``init`` and
    ``apply`` itself.
    """

    stochastic: ClassVar[bool] = False
    """Whether ``apply`` draws random numbers, and so needs a key."""
    changes_type: ClassVar[bool] = False
    """Whether the stage exists to give effective arrays another shape or dtype than the model's."""

    @abstractmethod
    def init(self, params: PyTree, key: jax.Array | None = None) -> PyTree:
        """The raw tree whose effective tree is ``params``.

        Arrays that no stage replaces are those of ``params`` itself, so donating the raw tree would delete them. Who
        needs them afterwards starts from a copy, ``raw = jax.tree.map(jnp.copy, p.init(params))``.

        Args:
          params: The model's parameters.
          key: For stages that draw their start; without one, ``jax.random.key(0)`` serves.
        """

    @abstractmethod
    def apply(self, raw: PyTree, key: jax.Array | None = None) -> PyTree:
        """The effective tree of ``raw``.

        Args:
          raw: What ``init`` made, or an optimizer made of it.
          key: A typed or legacy PRNG key; needed exactly where ``stochastic`` is true.
        """

    def update(self, raw: PyTree, key: jax.Array | None = None) -> PyTree:
        """``raw`` with its fixed values advanced by one training step; free values are left alone."""
        del key
        return raw

    def rebase(self, raw: PyTree) -> PyTree:
        """``raw`` with each stage's base at the current point, and the values that lead there from it at zero.

        The effective tree stays the same. Momentum that an optimizer holds for these values is that of the old base,
        where the same numbers mean another direction: set it to zero, or rebase seldom.
        """
        return raw

    @property
    def advances(self) -> bool:
        """Whether ``update`` does anything."""
        return type(self).update is not Parametrization.update

    # What a chain calls: as the public four, on a tree in which other stages have left their markers.
    def _init(self, tree: PyTree, key: jax.Array | None) -> PyTree:
        return self.init(tree, key)

    def _apply(self, tree: PyTree, key: jax.Array | None) -> PyTree:
        return self.apply(tree, key)

    def _update(self, tree: PyTree, key: jax.Array | None) -> PyTree:
        return self.update(tree, key)

    def _rebase(self, tree: PyTree) -> PyTree:
        return self.rebase(tree)

    @property
    def deterministic(self) -> "Parametrization":
        """The same chain with each random stage replaced by its mean: to evaluate, fold and export with."""
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
        tree = _differences.abstract(lambda x: x, params)
        owners = {slot.path: slot.path for slot in _raw.flatten(tree)[1]}
        for stage in reversed(_stages(self)):
            owners = _raw.followed(owners, stage._sources(tree))
            tree = _differences.abstract(functools.partial(stage._init, key=None), tree)
        return owners

    def _sources(self, tree: PyTree) -> dict[str, str]:
        """For each array that holds no value of its own, the path of the one that it takes it from."""
        del tree
        return {}

    def fold(self, raw: PyTree) -> PyTree:
        """Plain parameters for export: ``p.deterministic.apply(raw)``."""
        return self.deterministic.apply(raw)

    def fuse(self, later: "Parametrization") -> "Parametrization | None":
        """One stage of the same distribution as ``self >> later``, or None where there is no closed form."""
        del later
        return None

    def __rshift__(self, later: object) -> "Parametrization":
        if not isinstance(later, Parametrization):
            return NotImplemented
        kept_apart = any(isinstance(part, Chain) and not part.fused for part in (self, later))
        return compose((self, later), fused=not kept_apart)

    def __repr__(self) -> str:
        return _manifest.expression(self)

    def to_json(self) -> str:
        """The configuration as JSON, to lie beside a checkpoint; :func:`from_json` reads it."""
        return _manifest.dumps(_stages(self))

    def check(self, raw: PyTree, like: PyTree) -> None:
        """Compares a raw tree, such as a restored checkpoint, with what ``init`` would make of ``like``.

        Args:
          raw: The raw tree to check.
          like: The model's parameters, or their shapes and dtypes.

        Raises:
          ValueError: Naming every path that is missing, unexpected, or of another shape, dtype or stage.
        """
        _differences.require_none(call(self, "check"), raw, like, self.init)

    def shardings(self, specs: PyTree, mesh: _shardings.AnyMesh, like: PyTree | None = None) -> PyTree:
        """The shardings of the raw tree: each axis is cut as the axis of its parameter is that it follows.

        An axis that follows none, or that its mesh axes do not divide, stays whole. Nothing is computed: ``init`` is
        traced once for each length of an axis in ``like``.

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
        traced = functools.partial(self._init, key=None)
        return _shardings.of_raw(call(self, "shardings"), self.init, traced, specs, mesh, like)


class Chain(Parametrization):
    """Stages in a row, the one nearest to the raw tree first; what ``>>`` builds. ``Chain()`` is the identity.

    Args:
      stages: The stages. Chains among them are flattened and neighbours with a closed form are fused.
      fused: False keeps neighbours apart, as ``deterministic`` does where noise stood between two of them.

    Example:
      >>> import reparax as rpx
      >>> (rpx.WeightNorm() >> rpx.VarNoise(3.0)) >> rpx.VarNoise(4.0)
      WeightNorm() >> VarNoise(5.0)
      >>> rpx.VarNoise(5.0).deterministic
      Chain()
    """

    stages: tuple[Parametrization, ...] = ()
    fused: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        got: Any = self.stages
        if not isinstance(got, tuple):
            raise TypeError(f"Chain takes a tuple of parametrizations, but got {got!r} of type {type(got).__name__}.")
        apart = tuple(stage for part in self.stages for stage in _stages(part))
        fused = functools.reduce(_appended, apart, ())
        object.__setattr__(self, "stages", fused if self.fused else apart)
        object.__setattr__(self, "fused", len(self.stages) == len(fused))
        object.__setattr__(self, "stochastic", any(stage.stochastic for stage in self.stages))
        object.__setattr__(self, "changes_type", any(stage.changes_type for stage in self.stages))

    def __repr__(self) -> str:
        if not self.fused:
            return f"Chain({self.stages!r}, fused=False)"
        if len(self.stages) > 1:
            return " >> ".join(map(repr, self.stages))
        return f"Chain({self.stages!r})" if self.stages else "Chain()"

    @property
    def advances(self) -> bool:
        return any(stage.advances for stage in self.stages)

    @property
    def deterministic(self) -> Parametrization:
        return compose(tuple(stage.deterministic for stage in self.stages), fused=False)

    def init(self, params: PyTree, key: jax.Array | None = None) -> PyTree:
        for path, mark in _raw.markers(params).items():
            raise ValueError(
                f"{call(self, 'init')} takes the model's own parameters, but got a raw tree: it holds {mark!r} at "
                f"{path!r}. Call `init` once, with the whole chain, and pass its result to `apply`."
            )
        raw = self._init(params, _checked_key(self, "init", key))
        return _boxes.spread(functools.partial(self._init, key=None), params, raw)

    def apply(self, raw: PyTree, key: jax.Array | None = None) -> PyTree:
        effective = _recompute.recomputing(self._apply, _boxes.gathered(raw), self._checked(key))
        for path, mark in _raw.markers(effective).items():
            raise ValueError(f"{call(self, 'apply')} does not know {mark!r} at {path!r}: {_raw.OTHER_CHAIN}")
        return effective

    def update(self, raw: PyTree, key: jax.Array | None = None) -> PyTree:
        keys, tree = self._stage_keys(_checked_key(self, "update", key)), _boxes.gathered(raw)
        for i, stage in enumerate(self.stages):
            if stage.advances:
                seen = self._before(i, tree)
                tree = _raw.graft("update", tree, seen, stage._update(seen, keys[i]), free=False)
        return _boxes.spread_like(raw, tree)

    def rebase(self, raw: PyTree) -> PyTree:
        tree = _boxes.gathered(raw)
        for i, stage in enumerate(self.stages):
            seen = self._before(i, tree)
            tree = _raw.graft("rebase", tree, seen, stage._rebase(seen), free=True)
        return _boxes.spread_like(raw, tree)

    def _checked(self, key: jax.Array | None) -> jax.Array | None:
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
        return Chain(self.stages[:i], fused=False).deterministic._apply(tree, None)

    def _stage_keys(self, key: jax.Array | None) -> list[jax.Array | None]:
        return _keys.per_stage(key, [stage.kind for stage in self.stages])

    def _init(self, tree: PyTree, key: jax.Array | None) -> PyTree:
        for stage, stage_key in reversed(list(zip(self.stages, self._stage_keys(key), strict=True))):
            tree = stage._init(tree, stage_key)
        return tree

    def _apply(self, tree: PyTree, key: jax.Array | None) -> PyTree:
        for stage, stage_key in zip(self.stages, self._stage_keys(key), strict=True):
            tree = stage._apply(tree, stage_key)
        return tree


def _stages(part: object) -> tuple[Parametrization, ...]:
    if not isinstance(part, Parametrization):
        raise TypeError(f"Chain takes parametrizations, but got {part!r} of type {type(part).__name__}.")
    return part.stages if isinstance(part, Chain) else (part,)


def _appended(done: tuple[Parametrization, ...], stage: Parametrization) -> tuple[Parametrization, ...]:
    fused = done[-1].fuse(stage) if done else None
    return (*done, stage) if fused is None else _appended(done[:-1], fused)


def compose(stages: tuple[Parametrization, ...], *, fused: bool = True) -> Parametrization:
    """The chain of ``stages``; the stage itself where only one is left."""
    chain = Chain(stages, fused=fused)
    return chain.stages[0] if len(chain.stages) == 1 else chain


def call(p: Parametrization, method: str) -> str:
    """How an error names the call it speaks of: ``VarNoise(0.1).apply``, ``(a >> b).apply``."""
    text = " >> ".join(map(repr, _stages(p))) or repr(p)
    return f"({text}).{method}" if len(_stages(p)) > 1 else f"{text}.{method}"


def _checked_key(p: Parametrization, method: str, key: jax.Array | None) -> jax.Array | None:
    """``key`` as a typed scalar key, None as None."""
    tree = "params" if method == "init" else "raw"
    in_batches = f"jax.vmap(p.{method}, in_axes=(None, 0))({tree}, keys)"
    return None if key is None else _keys.checked(key, call(p, method), in_batches)
