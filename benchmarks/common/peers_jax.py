"""The same training steps in JAX: by hand, by reparax, and by what other libraries of JAX have of them.

A step takes the strength of noise or the rate of dropout, and a learning rate; it returns its loss. Each function here
makes one from weights of shape (inputs, outputs), inputs and targets.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import reparax as rpx

from . import by_hand

Arrays = list[np.ndarray]
Step = Callable[[float, float], float]
Make = Callable[[Arrays, np.ndarray, np.ndarray], Step]
Loss = Callable[[Any, Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""Of free values, held ones, a key and a strength: the loss, and the held values of the next step."""


def descent(loss: Loss, free: Any, held: Any = None) -> Step:
    """Steps of gradient descent, each with a key of its own."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(free: Any, held: Any, count: Any, strength: Any, rate: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), count)
        (value, held), slope = jax.value_and_grad(loss, has_aux=True)(free, held, key, strength)
        return (jax.tree.map(lambda w, dw: w - rate * dw, free, slope), held, count + 1), value

    state = {"now": (*jax.tree.map(jnp.array, (free, held)), jnp.int32(0))}  # copies, as a step takes what it is given

    def call(strength: float, rate: float) -> float:
        state["now"], value = jax.block_until_ready(step(*state["now"], jnp.float32(strength), jnp.float32(rate)))
        return float(value)

    return call


def error(layers: list[Callable[[Any], Any]], x: Any, y: Any) -> jax.Array:
    """The mean squared error of layers with ReLU between them."""
    for layer in layers[:-1]:
        x = jax.nn.relu(layer(x))
    return jnp.mean(jnp.square(layers[-1](x) - y))


def dense(w: Any) -> Callable[[Any], Any]:
    """A layer of effective weights."""
    return lambda x: x @ w


def tree(weights: Arrays) -> dict[str, jax.Array]:
    """Parameters as a tree."""
    return {f"layer{i}": jnp.asarray(w) for i, w in enumerate(weights)}


def written(start: Callable[[Any], Any], apply: Callable[[Any, jax.Array, jax.Array], Any]) -> Make:
    """By hand: ``start`` makes raw values of weights, ``apply`` makes weights of raw values, a key and a strength."""

    def make(weights: Arrays, x: np.ndarray, y: np.ndarray) -> Step:
        def loss(raw: Any, held: Any, key: jax.Array, strength: jax.Array) -> tuple[jax.Array, Any]:
            return error([dense(w) for w in apply(raw, key, strength).values()], x, y), held

        return descent(loss, start(tree(weights)))

    return make


def ours(
    chain: Callable[[Any], rpx.Parametrization], wrap: Callable[..., Callable[..., Any]] = lambda loss, argnums: loss
) -> Make:
    """By reparax: ``chain`` makes the chain of a strength, ``wrap`` is ``rpx.remat`` or leaves the loss as it is."""

    def make(weights: Arrays, x: np.ndarray, y: np.ndarray) -> Step:
        def network(free: Any, held: Any, key: jax.Array, strength: jax.Array) -> jax.Array:
            return error([dense(w) for w in chain(strength).apply(rpx.combine(free, held), key).values()], x, y)

        def loss(free: Any, held: Any, key: jax.Array, strength: jax.Array) -> tuple[jax.Array, Any]:
            _, held = rpx.partition(chain(strength).update(rpx.combine(free, held)))
            return wrap(network, argnums=(0, 1, 2, 3))(free, held, key, strength), held

        return descent(loss, *rpx.partition(chain(0.0).init(tree(weights))))

    return make


def naive_weight_norm(raw: Any) -> Any:
    """The formula as it is printed, which is NaN where a column is zero."""
    return {name: x["v"] * (x["g"] / jnp.linalg.norm(x["v"], axis=0, keepdims=True)) for name, x in raw.items()}


def spectral_by_hand(*, safe: bool) -> Make:
    """One step of power iteration before each step of training, and the weight divided by the product."""

    def size(x: jax.Array) -> jax.Array:
        return by_hand.largest(x) if safe else jnp.ones((1,) * x.ndim)

    def unit(x: jax.Array) -> jax.Array:
        return x / size(x) / jnp.linalg.norm(x / size(x))

    def divided(w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        u = unit(jax.lax.stop_gradient(w) @ v)
        v = unit(u @ jax.lax.stop_gradient(w))
        x = w / size(w)
        sigma = u @ (x @ v)
        return x / (jnp.where(sigma == 0, 1 / size(w), sigma) if safe else sigma), v

    def make(weights: Arrays, x: np.ndarray, y: np.ndarray) -> Step:
        def loss(params: Any, held: Any, key: jax.Array, strength: jax.Array) -> tuple[jax.Array, Any]:
            found = {name: divided(w, held[name]) for name, w in params.items()}
            return error([dense(w) for w, _ in found.values()], x, y), {name: v for name, (_, v) in found.items()}

        return descent(loss, tree(weights), {name: jnp.ones(w.shape[1]) for name, w in tree(weights).items()})

    return make


def orthogonal(raw: Any) -> Any:
    """The Cayley map of a square matrix, from a base that stays."""

    def cayley(x: jax.Array, base: jax.Array) -> jax.Array:
        along = base.T @ x
        skew, one = along - along.T, jnp.eye(len(x))
        return base @ jnp.linalg.solve(one - skew / 2, one + skew / 2)

    return {name: cayley(node["x"], jax.lax.stop_gradient(node["base"])) for name, node in raw.items()}


def at_base(params: Any) -> Any:
    """The start of :func:`orthogonal`, of weights that are orthogonal."""
    return {name: {"x": jnp.zeros_like(w), "base": w} for name, w in params.items()}


def linen(*, spectral: bool) -> Make:
    """Flax linen's wrappers of layers."""
    from flax import linen as nn

    class Network(nn.Module):
        """Wrapped dense layers."""

        widths: tuple[int, ...]

        @nn.compact
        def __call__(self, x: Any, y: Any) -> jax.Array:
            wrap = functools.partial(nn.SpectralNorm, collection_name="held") if spectral else nn.WeightNorm
            options = {"update_stats": True} if spectral else {}
            wrapped = [wrap(nn.Dense(width, use_bias=False)) for width in self.widths]
            return error([lambda x, layer=layer: layer(x, **options) for layer in wrapped], x, y)

    def make(weights: Arrays, x: np.ndarray, y: np.ndarray) -> Step:
        model = Network(tuple(w.shape[1] for w in weights))
        variables = model.init(jax.random.key(0), x, y)
        params = dict(variables["params"])
        for i, w in enumerate(weights):
            params[f"Dense_{i}"] = {"kernel": jnp.asarray(w)}
            if not spectral:
                params[f"WeightNorm_{i}"] = {f"Dense_{i}/kernel/scale": jnp.linalg.norm(w, axis=0)}

        def loss(params: Any, held: Any, key: jax.Array, strength: jax.Array) -> tuple[jax.Array, Any]:
            return model.apply({"params": params, **held}, x, y, mutable=list(held))

        return descent(loss, params, {name: value for name, value in variables.items() if name != "params"})

    return make


def nnx(*, spectral: bool) -> Make:
    """Flax nnx's wrappers of layers."""
    from flax import nnx

    def make(weights: Arrays, x: np.ndarray, y: np.ndarray) -> Step:
        rngs = nnx.Rngs(0)

        def wrapped(w: np.ndarray) -> Any:
            layer = nnx.Linear(*w.shape, use_bias=False, rngs=rngs)
            layer.kernel.set_value(jnp.asarray(w))
            if spectral:
                return nnx.SpectralNorm(layer, rngs=rngs, update_stats=True)
            lengths = jnp.linalg.norm(w, axis=0)
            return nnx.WeightNorm(layer, scale_init=lambda key, shape: lengths, rngs=rngs)

        graph, params, held = nnx.split(nnx.List([wrapped(w) for w in weights]), nnx.Param, ...)

        def loss(params: Any, held: Any, key: jax.Array, strength: jax.Array) -> tuple[jax.Array, Any]:
            layers = nnx.merge(graph, params, jax.tree.map(jnp.asarray, held))  # variables that may change in here
            value = error(list(layers), x, y)
            return value, nnx.split(layers, nnx.Param, ...)[2]

        return descent(loss, params, held)

    return make


def equinox(*, spectral: bool) -> Make:
    """Equinox's wrappers of layers, mapped over the batch."""
    import equinox as eqx

    def wrapped(w: np.ndarray) -> Any:
        layer = eqx.nn.Linear(*w.shape, use_bias=False, key=jax.random.key(0))
        layer = eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(w.T))
        return eqx.nn.SpectralNorm(layer, "weight", key=jax.random.key(0)) if spectral else eqx.nn.WeightNorm(layer)

    def make(weights: Arrays, x: np.ndarray, y: np.ndarray) -> Step:
        layers, state = eqx.nn.make_with_state(lambda: [wrapped(w) for w in weights])()
        free, static = eqx.partition(layers, eqx.is_inexact_array)

        def loss(free: Any, state: Any, key: jax.Array, strength: jax.Array) -> tuple[jax.Array, Any]:
            states = [state]

            def applied(layer: Any, x: Any) -> Any:
                if not spectral:
                    return jax.vmap(layer)(x)
                found, after = jax.vmap(layer, in_axes=(0, None), out_axes=(0, None))(x, states[-1])
                states.append(after)
                return found

            layers = [functools.partial(applied, layer) for layer in eqx.combine(free, static)]
            return error(layers, x, y), states[-1]

        return descent(loss, free, state)

    return make


def paramax(weights: Arrays, x: np.ndarray, y: np.ndarray) -> Step:
    """Paramax's wrapper of arrays, whose length is softplus of a number."""
    import equinox as eqx
    import paramax

    def wrapped(w: np.ndarray) -> Any:
        length = jnp.linalg.norm(w.T, axis=1, keepdims=True)
        scale = paramax.Parameterize(jax.nn.softplus, length + jnp.log(-jnp.expm1(-length)))
        node = paramax.WeightNormalization(jnp.asarray(w.T))
        return eqx.tree_at(lambda node: node.scale, node, scale)  # its own start is the inverse of the length

    free, static = eqx.partition([wrapped(w) for w in weights], eqx.is_inexact_array)

    def loss(free: Any, held: Any, key: jax.Array, strength: jax.Array) -> tuple[jax.Array, Any]:
        return error([dense(w.T) for w in paramax.unwrap(eqx.combine(free, static))], x, y), held

    return descent(loss, free)


TASKS: dict[str, dict[str, Make]] = {
    "plain": {"by hand": written(dict, lambda raw, key, strength: raw)},
    "weight norm": {
        "by hand": written(by_hand.with_lengths, lambda raw, key, strength: by_hand.weight_norm(raw)),
        "by hand, NaN at zero": written(by_hand.with_lengths, lambda raw, key, strength: naive_weight_norm(raw)),
    },
    "noise": {"by hand": written(dict, by_hand.noise)},
    "weight norm and noise": {
        "by hand": written(
            by_hand.with_lengths, lambda raw, key, std: by_hand.noise(by_hand.weight_norm(raw), key, std)
        )
    },
    "weight dropout": {"by hand": written(dict, by_hand.dropout)},
    "spectral norm": {
        "by hand": spectral_by_hand(safe=True),
        "by hand, NaN at zero": spectral_by_hand(safe=False),
    },
    "orthogonal": {"by hand": written(at_base, lambda raw, key, strength: orthogonal(raw))},
}
"""The tasks, and the ways of plain JAX to do them."""
