"""Gradient estimates from noise, for functions that are only evaluated."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._axes.boxes import gather_boxes, spread_like
from reparax._core.algebra import Chain, Parametrization, call, require_chains
from reparax._core.keys import Keys, check_key
from reparax._core.plan import run
from reparax._numerics.arithmetic import is_inexact, widened
from reparax._tree.flat import Flat, flatten, nest
from reparax._tree.paths import Names, PyTree, is_array, is_traceable
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

    tree = flatten(gather_boxes(raw))
    moving = {place: x for place, x in tree.arrays.items() if is_array(x) and is_inexact(x)}

    def before(values: dict[Names, Array]) -> Flat:
        return run(stages[:place], replace(tree, arrays={**tree.arrays, **values}), Keys(None))

    seen = before(moving)
    unit = replace(noise, std=1.0)
    zeros = {at: jnp.zeros_like(x) for at, x in seen.arrays.items() if is_array(x) and is_inexact(x)}
    still = replace(seen, arrays={**seen.arrays, **zeros})

    def add(total: dict[Names, Array], member: tuple[Array, Array]) -> tuple[dict[Names, Array], None]:
        keys = Keys(check_key(member[0], "noise_gradient", "noise_gradient(p, raw, keys, fitness)"))
        drawn = run((unit,), still, keys).arrays
        return {at: t + member[1].astype(t.dtype) * drawn[at].astype(t.dtype) for at, t in total.items()}, None

    total, _ = jax.lax.scan(add, {at: widened(zero) for at, zero in zeros.items()}, (keys, fitness))
    scale = 1 / (len(fitness) * jnp.asarray(noise.std))
    _, pull = jax.vjp(lambda values: {at: before(values).arrays[at] for at in zeros}, moving)
    # Each part of a complex number has half of the variance, and JAX's gradients are conjugates.
    whole = {at: 2 * t.conj() if jnp.iscomplexobj(t) else t for at, t in total.items()}
    (found,) = pull({at: (t * scale.astype(t.dtype)).astype(seen.arrays[at].dtype) for at, t in whole.items()})
    return spread_like(raw, nest(replace(tree, arrays={at: found.get(at, _still(x)) for at, x in tree.arrays.items()})))


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
