"""The program of haiku's ImageNet example, small: a network with state, Nesterov's momentum, L2 without batch norm."""

from functools import partial
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

rng = np.random.default_rng(0)
images, labels = rng.normal(size=(64, 8)).astype(np.float32), rng.integers(4, size=64).astype(np.int32)
batches = [{"images": images[i : i + 16], "labels": labels[i : i + 16]} for i in range(0, 64, 16)]
TRACED, losses = [], []


class TrainState(NamedTuple):
    params: Any
    state: Any
    opt_state: Any


def _forward(batch, is_training):
    x = hk.Linear(16)(batch["images"])
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training)
    return hk.Linear(4, name="logits")(jax.nn.relu(x))


forward = hk.transform_with_state(_forward)


def make_optimizer():
    return optax.chain(optax.trace(decay=0.9, nesterov=True), optax.scale_by_schedule(lambda _: 0.05), optax.scale(-1))


def l2_loss(params):
    return 0.5 * sum(jnp.sum(jnp.square(p)) for p in params)


def loss_fn(params, state, batch):
    logits, state = forward.apply(params, state, None, batch, is_training=True)
    labels = jax.nn.one_hot(batch["labels"], 4)
    loss = optax.softmax_cross_entropy(logits=logits, labels=labels).mean()
    l2_params = [p for path, p in jax.tree.leaves_with_path(params) if "batch_norm" not in path[0].key]
    loss = loss + 1e-4 * l2_loss(l2_params)
    return loss, (loss, state)


@partial(jax.jit, donate_argnums=(0,))
def train_step(train_state, batch):
    TRACED.append("train_step")
    params, state, opt_state = train_state
    grads, (loss, new_state) = jax.grad(loss_fn, has_aux=True)(params, state, batch)
    updates, new_opt_state = make_optimizer().update(grads, opt_state)
    new_params = optax.apply_updates(params, updates)
    return TrainState(new_params, new_state, new_opt_state), loss


def initial_state(rng, batch):
    params, state = forward.init(rng, batch, is_training=True)
    return TrainState(params, state, make_optimizer().init(params))


@jax.jit
def eval_batch(params, state, batch):
    logits, _ = forward.apply(params, state, None, batch, is_training=False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


train_state = initial_state(jax.random.key(42), batches[0])
for batch in batches:
    train_state, loss = train_step(train_state, batch)
    losses.append(float(loss))
losses.append(float(eval_batch(train_state.params, train_state.state, batches[0])))
