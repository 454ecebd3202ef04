"""Gradient estimates from noise, for functions that are evaluated but not differentiated."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax._axes.boxes import gather_boxes, spread_like
from reparax._core.algebra import Chain, Parametrization
from reparax._core.calls import call_name, require_chains
from reparax._core.draws import draw_for_sites
from reparax._core.keys import Keys, check_key
from reparax._core.layers import Layer
from reparax._core.plan import close_all
from reparax._core.planner import planner_of
from reparax._numerics.arguments import check_positive_whole
from reparax._numerics.arithmetic import is_inexact, widened
from reparax._numerics.usage import shows_usage
from reparax._tree.flat import Flat, flatten, nest
from reparax._tree.paths import Names, PyTree, is_array, is_traceable
from reparax.noise._stages import VarNoise

CALL = "noise_gradient(p, raw, keys, fitness)"


@shows_usage
def noise_gradient(p: Parametrization, raw: PyTree, keys: Array, fitness: Array, *, chunk: int | None = None) -> PyTree:
    r"""The estimate of evolution strategies: :math:`\frac{1}{n \sigma} \sum_i f_i \varepsilon_i`, a tree like ``raw``.

    :math:`\varepsilon_i` is the noise of ``p.apply(raw, keys[i])``. It is drawn again, so the population is never
    stored. The sum estimates the gradient of the mean of f over the noise, with respect to the arrays that receive the
    noise; the chain rule carries it to the raw values. Fixed values get zeros. To minimize a loss, let f be the loss;
    to maximize a reward, let f be the negative reward.

    Noise of low rank, ``VarNoise(std, rank=r)``, is never formed: :math:`\sum_i f_i A_i B_i` is one product of a matrix
    of shape ``(rows, chunk * r)`` and one of shape ``(chunk * r, columns)``.

    For mirrored pairs, evaluate f with ``VarNoise(std)`` and ``VarNoise(-std)`` on one key, and pass that key once with
    half the difference of the two: then a constant in f cancels. So 64 mirrored members are 32 keys.

    Args:
      p: A chain with one :class:`VarNoise`, with a nonzero ``std`` and without ``relative``, and no other random stage.
      raw: The raw tree around which the members were drawn.
      keys: A batch of keys, one for each member.
      fitness: A number for each member; usually centered (minus the mean) or ranked.
      chunk: How many members are drawn at a time; more take more memory and less time. Default: one member or, for
        noise of low rank, as many as take no more numbers than the arrays.

    Raises:
      TypeError: If ``chunk`` is not a whole number.
      ValueError: If the chain does not have exactly one such stage, if ``keys`` and ``fitness`` differ in length, or if
        ``chunk`` is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p, raw = rpx.VarNoise(0.1), {"w": jnp.array([1.0, -2.0])}
      >>> keys = jax.random.split(jax.random.key(0), 4096)
      >>> fitness = jax.vmap(lambda key: jnp.sum(p.apply(raw, key)["w"] ** 2))(keys)
      >>> estimate = rpx.noise.noise_gradient(p, raw, keys, fitness - fitness.mean())["w"]
      >>> bool(jnp.allclose(estimate, jnp.array([2.0, -4.0]), atol=0.2))
      True

    References:
      Salimans, Ho, Chen, Sidor and Sutskever, *Evolution Strategies as a Scalable Alternative to Reinforcement
      Learning*, 2017; of low rank: Sarkar et al., *Evolution Strategies at the Hyperscale*, 2025.
    """
    require_chains(f"noise.{CALL}", p)
    stages = p.stages if isinstance(p, Chain) else (p,)
    place, noise = _find_noise(p, stages)
    if chunk is not None:
        check_positive_whole(chunk, "noise_gradient", "chunk")
    _require_counts(keys, fitness)

    tree = flatten(gather_boxes(raw))
    moving = {place: x for place, x in tree.arrays.items() if is_array(x) and is_inexact(x)}

    def apply_earlier(values: dict[Names, Array]) -> Flat:
        return close_all(stages[:place], replace(tree, arrays={**tree.arrays, **values}), Keys(None))

    noisy_tree = apply_earlier(moving)
    arrays = {place: x if is_traceable(x) else None for place, x in noisy_tree.arrays.items()}
    total = _sum_over_members(replace(noise, std=1.0), nest(replace(noisy_tree, arrays=arrays)), keys, fitness, chunk)
    scale = 1 / (len(fitness) * jnp.asarray(noise.std))
    _, pull = jax.vjp(lambda values: {at: apply_earlier(values).arrays[at] for at in total}, moving)
    # Each part of a complex number has half of the variance, and JAX's gradients are conjugates.
    cotangents = {at: 2 * t.conj() if jnp.iscomplexobj(t) else t for at, t in total.items()}
    (gradient,) = pull(
        {at: (t * scale.astype(t.dtype)).astype(noisy_tree.arrays[at].dtype) for at, t in cotangents.items()}
    )
    return spread_like(
        raw, nest(replace(tree, arrays={at: gradient.get(at, _zero_gradient(x)) for at, x in tree.arrays.items()}))
    )


def _require_counts(keys: Array, fitness: Array) -> None:
    """Requires one number of ``fitness`` for each key."""
    if keys.shape[:1] == fitness.shape and fitness.ndim == 1:
        return
    is_mirrored = fitness.shape == (2 * keys.shape[0],) if keys.ndim else False
    remedy = "half the difference of each mirrored pair" if is_mirrored else "one number for each member"
    raise ValueError(
        f"noise_gradient takes a number for each key, but got fitness of shape {fitness.shape} for keys of shape "
        f"{keys.shape}. Pass one key and {remedy}."
    )


@functools.partial(jax.jit, static_argnames="chunk")
def _sum_over_members(
    noise: VarNoise, tree: PyTree, keys: Array, fitness: Array, chunk: int | None
) -> dict[Names, Array]:
    """For each array with noise the sum over all members of it times their fitness; the loop is compiled once."""
    noisy_tree = flatten(tree)
    layer, total = planner_of(noise).plan("apply", noisy_tree.types), dict[Names, Array]()
    for kind in (_Full, _LowRank):
        sites_of_kind = [
            site for site in layer.sites if site.stage._is_low(noisy_tree.arrays[site.spots["w"].place]) == kind.is_low
        ]
        sites = [replace(site, stage=kind(site.stage)) for site in sites_of_kind]
        total |= _sum_alike(replace(layer, sites=sites), noisy_tree.arrays, keys, fitness, chunk) if sites else {}
    return total


def _sum_alike(
    layer: Layer, arrays: Mapping[Names, Any], keys: Array, fitness: Array, chunk: int | None
) -> dict[Names, Array]:
    """The sums over members for arrays with noise of full rank, or for arrays with noise of low rank."""
    likes = [widened(jnp.asarray(arrays[site.spots["w"].place])) for site in layer.sites]
    pairs = list(zip([site.stage for site in layer.sites], likes, strict=True))
    drawn_by_one = sum(stage.size(like) for stage, like in pairs)
    size = chunk or max(1, sum(like.size for like in likes) // max(1, drawn_by_one))
    steps = -(-len(fitness) // size)
    shape = steps, -(-len(fitness) // max(steps, 1))
    places = np.arange(math.prod(shape)).reshape(shape)

    def draw_member(key: Array) -> dict[int, Array]:
        return draw_for_sites(layer, arrays, Keys(check_key(key, "noise_gradient", CALL)))

    def add(total: list[Array], members: tuple[Array, Array]) -> tuple[list[Array], None]:
        noise = jax.vmap(draw_member)(members[0])
        parts = [stage.sum_members(like, members[1], noise[i]) for i, (stage, like) in enumerate(pairs)]
        return [t + part for t, part in zip(total, parts, strict=True)], None

    # The last member fills the last step, and counts once.
    members = np.minimum(places, len(fitness) - 1)
    fitness_or_zero = jnp.where(places < len(fitness), fitness[members], 0)
    total, _ = jax.lax.scan(add, [jnp.zeros_like(like) for like in likes], (keys[members], fitness_or_zero))
    return {site.spots["w"].place: t for site, t in zip(layer.sites, total, strict=True)}


@dataclass(frozen=True)
class _Full:
    """Noise of full rank."""

    stage: Any

    stochastic: ClassVar[bool] = True
    is_low: ClassVar[bool] = False

    @property
    def shared(self) -> Any:
        return self.stage.shared

    def size(self, like: Array) -> int:
        """How many numbers are drawn."""
        return like.size

    def draw(self, like: Array, key: Array) -> Array:
        return self.stage.draw(like, key)

    def sum_members(self, like: Array, fitness: Array, noise: Array) -> Array:
        """The sum over members of their noise times their fitness."""
        return jnp.tensordot(fitness.astype(like.dtype), noise, 1, precision="highest")


class _LowRank(_Full):
    """Noise of low rank: its factors, one behind the other."""

    is_low: ClassVar[bool] = True

    def size(self, like: Array) -> int:
        return sum(math.prod(x.shape) for x in self._factor_types(like))

    def _factor_types(self, like: Array) -> tuple[Any, Any]:
        """The types of both factors."""
        return jax.eval_shape(self.stage._factors, like, jax.random.key(0))

    def draw(self, like: Array, key: Array) -> Array:
        factors = self.stage._factors(widened(like), key)
        return jnp.concatenate([x.reshape(*key.shape, -1) for x in factors], axis=-1)

    def sum_members(self, like: Array, fitness: Array, noise: Array) -> Array:
        a, b = self._factor_types(like)
        first_factors, second_factors = jnp.split(noise, [math.prod(a.shape)], axis=1)
        weighted = first_factors.reshape(-1, *a.shape) * fitness.astype(like.dtype).reshape(-1, *(1 for _ in a.shape))
        pairs = jnp.einsum("n...ir,n...rj->...ij", weighted, second_factors.reshape(-1, *b.shape), precision="highest")
        return self.stage._unfold(pairs, like)


def _zero_gradient(x: Any) -> Any:
    """The zero gradient of a leaf that is not a floating array."""
    return jnp.zeros_like(x) if is_traceable(x) else x


def _find_noise(p: Parametrization, stages: tuple[Parametrization, ...]) -> tuple[int, Any]:
    """The index of the noise stage in the chain, and the stage."""
    random_stages = [i for i, stage in enumerate(stages) if stage.stochastic]
    noise: Any = stages[random_stages[0]] if len(random_stages) == 1 else None
    varies = isinstance(noise, VarNoise) and not isinstance(noise.std, float | jax.Array)
    is_zero = isinstance(noise, VarNoise) and isinstance(noise.std, float) and noise.std == 0.0
    if not isinstance(noise, VarNoise) or noise.relative is not None or is_zero or varies:
        raise ValueError(
            f"{call_name(p, 'noise_gradient')} takes a chain with one VarNoise, with one nonzero std and without "
            f"`relative`, and no other random stage. Pass such a chain."
        )
    return random_stages[0], noise
