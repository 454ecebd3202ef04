"""Programs that several test files run: compiled once for each parametrization and shape."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import reparax as rpx


def zeros(f, *args):
    """Zeros of the types that ``f`` gives, which need no program."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(f, *args))


@jax.jit
def init(p, params, key=None):
    """The raw tree; stages that refuse known numbers take them here, as they are traced."""
    return p.init(params, key)


@jax.jit
def effective(p, raw, key=None):
    """The tree that the model reads."""
    return p.apply(raw, key)


@jax.jit
def fold(p, raw):
    """The tree that the model reads without noise."""
    return p.fold(raw)


@jax.jit
def read(p, raw):
    """What the model reads."""
    return p.apply(raw)["w"]


@jax.jit
def update(p, raw, key=None, grads=None):
    """The raw tree after ``p.update``."""
    return p.update(raw, key, grads)


@jax.jit
def projected(stage, w):
    """The point of the image where ``stage`` starts from ``w``."""
    return stage.project(w)


@jax.jit
def contained(stage, w):
    """Whether ``w`` is a point of the image."""
    return stage.contains(w)


@jax.jit
def pulled(p, raw, dw):
    """The gradient of the raw values of ``w`` where ``dw`` is that of the effective array."""
    return jax.vjp(p.apply, raw)[1]({"w": dw})[0]["w"]


@jax.jit
def trained(p, raw, target):
    """The effective tree and the losses of a hundred steps of AdamW, with weight decay, towards ``target``."""
    tx = optax.partition(
        {"free": optax.adamw(0.1, weight_decay=0.1), "fixed": optax.set_to_zero()}, rpx.training.param_labels
    )

    def loss(raw):
        return sum(jnp.sum(jnp.square(w - target[name])) for name, w in p.apply(raw).items())

    def step(state, _):
        raw, moments = state
        value, slope = jax.value_and_grad(loss)(raw)
        with jax.numpy_dtype_promotion("standard"):  # adam raises a float to an integer power
            updates, moments = tx.update(slope, moments, raw)
        return (optax.apply_updates(raw, updates), moments), value

    (raw, _), losses = jax.lax.scan(step, (raw, tx.init(raw)), length=100)
    return p.apply(raw), losses
