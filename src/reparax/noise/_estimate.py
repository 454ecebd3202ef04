"""Gradient estimates from noise, for functions that are only evaluated."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._axes.boxes import gather_boxes, spread_like
from reparax._core.algebra import Chain, Parametrization, call, require_chains
from reparax._core.keys import Keys, check_key
from reparax._core.pending import settle
from reparax._numerics.arithmetic import inexact_places, widened
from reparax._tree.paths import PyTree, is_traceable
from reparax.noise._stages import VarNoise


def noise_gradient(p: Parametrization, raw: PyTree, keys: Array, fitness: Array) -> PyTree:
    r"""The estimate of evolution strategies: :math:`\frac{1}{n \sigma} \sum_i f_i \varepsilon_i`, a tree like ``raw``.

    :math:`\varepsilon_i` is the noise of ``p.apply(raw, keys[i])``. It is drawn again for one member at a time, so the
    memory is that of one member. The sum estimates the gradient of the mean of f over the noise, with respect to the
    arrays that receive the noise; the chain rule carries it to the raw values. Fixed values get zeros. To minimize a
    loss, let f be the loss; to maximize a reward, let f be the negative reward.

    For mirrored pairs, evaluate f with ``VarNoise(std)`` and ``VarNoise(-std)`` on one key, and pass that key once with
    half the difference of the two: then a constant in f cancels.

    Args:
      p: A chain with one :class:`VarNoise`, with a nonzero ``std`` and without ``relative``, and no other random stage.
      raw: The raw tree around which the members were drawn.
      keys: A batch of keys, one for each member.
      fitness: A number for each member; usually centered (minus the mean) or ranked.

    Raises:
      ValueError: If the chain does not have exactly one such stage, or if ``keys`` and ``fitness`` differ in length.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p, raw = rpx.VarNoise(0.1), {"w": jnp.array([1.0, -2.0])}
      >>> keys = jax.random.split(jax.random.key(0), 4096)
      >>> fitness = jax.vmap(lambda key: jnp.sum(p.apply(raw, key)["w"] ** 2))(keys)
      >>> estimate = rpx.noise_gradient(p, raw, keys, fitness - fitness.mean())["w"]
      >>> bool(jnp.allclose(estimate, jnp.array([2.0, -4.0]), atol=0.2))
      True

    References:
      Salimans, Ho, Chen, Sidor and Sutskever, *Evolution Strategies as a Scalable Alternative to Reinforcement
      Learning*, 2017.
    """
    require_chains("noise_gradient(p, raw, keys, fitness)", p)
    stages = p.stages if isinstance(p, Chain) else (p,)
    place, noise = _noise(p, stages)
    if keys.shape[:1] != fitness.shape or fitness.ndim != 1:
        raise ValueError(
            f"noise_gradient takes a number for each key, but got fitness of shape {fitness.shape} for keys of shape "
            f"{keys.shape}. Pass one key and one number for each member."
        )

    leaves, treedef = jax.tree.flatten(gather_boxes(raw))
    moving = inexact_places(leaves)

    def before(values: list[Array]) -> PyTree:
        held = dict(zip(moving, values, strict=True))
        tree = treedef.unflatten([held.get(i, x) for i, x in enumerate(leaves)])
        return Chain(stages[:place]).apply_tree(tree, Keys(None))

    seen, seen_def = jax.tree.flatten(before([leaves[i] for i in moving]))
    noisy, unit = inexact_places(seen), replace(noise, std=1.0)
    zeros = seen_def.unflatten([jnp.zeros_like(x) if i in noisy else x for i, x in enumerate(seen)])

    def add(total: list[Array], member: tuple[Array, Array]) -> tuple[list[Array], None]:
        keys = Keys(check_key(member[0], "noise_gradient", "noise_gradient(p, raw, keys, fitness)"))
        drawn = jax.tree.leaves(settle(unit.apply_tree(zeros, keys), keys))
        pairs = zip(total, noisy, strict=True)
        return [t + member[1].astype(t.dtype) * drawn[i].astype(t.dtype) for t, i in pairs], None

    total, _ = jax.lax.scan(add, [widened(jnp.zeros_like(seen[i])) for i in noisy], (keys, fitness))
    scale = 1 / (len(fitness) * jnp.asarray(noise.std))
    _, pull = jax.vjp(lambda values: [jax.tree.leaves(before(values))[i] for i in noisy], [leaves[i] for i in moving])
    # Each part of a complex number has half of the variance, and JAX's gradients are conjugates.
    whole = [2 * t.conj() if jnp.iscomplexobj(t) else t for t in total]
    (found,) = pull([(t * scale.astype(t.dtype)).astype(seen[i].dtype) for t, i in zip(whole, noisy, strict=True)])
    gradient = dict(zip(moving, found, strict=True))
    return spread_like(raw, treedef.unflatten([gradient.get(i, _still(x)) for i, x in enumerate(leaves)]))


def _still(x: Any) -> Any:
    """The zero gradient of a leaf that is not a floating array."""
    return jnp.zeros_like(x) if is_traceable(x) else x


def _noise(p: Parametrization, stages: tuple[Parametrization, ...]) -> tuple[int, Any]:
    """The index of the noise stage in the chain, and the stage."""
    found = [i for i, stage in enumerate(stages) if stage.stochastic]
    noise: Any = stages[found[0]] if len(found) == 1 else None
    varies = isinstance(noise, VarNoise) and not isinstance(noise.std, float | jax.Array)
    is_zero = isinstance(noise, VarNoise) and isinstance(noise.std, float) and noise.std == 0.0
    if not isinstance(noise, VarNoise) or noise.relative is not None or is_zero or varies:
        raise ValueError(
            f"{call(p, 'noise_gradient')} takes a chain with one VarNoise, with one nonzero std and without "
            f"`relative`, and no other random stage. Pass such a chain."
        )
    return found[0], noise
