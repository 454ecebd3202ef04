"""The gradient that noise estimates, of a function that is only evaluated."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._axes.boxes import gather_boxes, spread_like
from reparax._core.algebra import Chain, Parametrization, call
from reparax._core.keys import Keys, check_key
from reparax._core.pending import settle
from reparax._numerics.arithmetic import inexact_places, widened
from reparax._tree.paths import PyTree, is_traceable
from reparax.noise._stages import VarNoise


def noise_gradient(p: Parametrization, raw: PyTree, keys: Array, fitness: Array) -> PyTree:
    r"""The estimate of evolution strategies: :math:`\frac{1}{n \sigma} \sum_i f_i \varepsilon_i`, a tree like ``raw``.

    :math:`\varepsilon_i` is what ``p.apply(raw, keys[i])`` has drawn, and is drawn again, member by member, so that the
    memory is that of one member. It estimates the gradient of the mean of f over the noise with respect to the arrays
    that the noise stands on, and is carried on from these to the raw values by the chain rule; fixed values have zeros.
    To descend on a loss, f is the loss; to climb on a reward, move against the estimate of its negative.

    For mirrored pairs evaluate with ``VarNoise(std)`` and ``VarNoise(-std)`` on one key, and pass the key once with the
    difference of both, divided by two: then a constant in f cancels.

    Args:
      p: A chain with one :class:`VarNoise`, of a std that is not zero and not ``relative``, and no other random stage.
      raw: The raw tree, around which the members were drawn.
      keys: A batch of keys, one for each member.
      fitness: A number for each member; usually with their mean taken away, or ranked.

    Raises:
      ValueError: If the chain has not one such stage, or there are not as many numbers as keys.

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
    stages = p.stages if isinstance(p, Chain) else (p,)
    place, noise = _noise(p, stages)
    if keys.shape[:1] != fitness.shape or fitness.ndim != 1:
        raise ValueError(
            f"noise_gradient takes a number for each key, but got fitness of shape {fitness.shape} for keys of shape "
            f"{keys.shape}. Pass one of each for each member."
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
    # Each part of a complex number has half of the variance, and its gradient is the conjugate by JAX's convention.
    whole = [2 * t.conj() if jnp.iscomplexobj(t) else t for t in total]
    (found,) = pull([(t * scale.astype(t.dtype)).astype(seen[i].dtype) for t, i in zip(whole, noisy, strict=True)])
    gradient = dict(zip(moving, found, strict=True))
    return spread_like(raw, treedef.unflatten([gradient.get(i, _still(x)) for i, x in enumerate(leaves)]))


def _still(x: Any) -> Any:
    """The gradient of what is no floating array."""
    return jnp.zeros_like(x) if is_traceable(x) else x


def _noise(p: Parametrization, stages: tuple[Parametrization, ...]) -> tuple[int, Any]:
    """The place of the one stage of noise, and the stage."""
    found = [i for i, stage in enumerate(stages) if stage.stochastic]
    noise: Any = stages[found[0]] if len(found) == 1 else None
    varies = isinstance(noise, VarNoise) and not isinstance(noise.std, float | jax.Array)
    is_zero = isinstance(noise, VarNoise) and isinstance(noise.std, float) and noise.std == 0.0
    if not isinstance(noise, VarNoise) or noise.relative is not None or is_zero or varies:
        raise ValueError(
            f"{call(p, 'noise_gradient')} takes a chain with one VarNoise, of one std that is not zero and not "
            f"relative, and no other random stage. Write such a chain."
        )
    return found[0], noise
