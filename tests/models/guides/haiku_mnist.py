"""The program of haiku's MNIST example, on small images that it makes: a loss with L2, Adam, averaged parameters."""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

rng = np.random.default_rng(0)
images, labels = rng.normal(size=(64, 8, 8, 1)).astype(np.float32), rng.integers(10, size=64).astype(np.int32)
batches = [{"image": images[i : i + 16], "label": labels[i : i + 16]} for i in range(0, 64, 16)]
TRACED, losses = [], []


class TrainingState(NamedTuple):
    params: Any
    avg_params: Any
    opt_state: Any


def net_fn(images):
    mlp = hk.Sequential([hk.Flatten(), hk.Linear(16), jax.nn.relu, hk.Linear(10)])
    return mlp(images)


network = hk.without_apply_rng(hk.transform(net_fn))
optimiser = optax.adam(0.005)


def loss(params, batch):
    batch_size, *_ = batch["image"].shape
    logits = network.apply(params, batch["image"])
    labels = jax.nn.one_hot(batch["label"], 10)
    l2_regulariser = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    log_likelihood = jnp.sum(labels * jax.nn.log_softmax(logits))
    return -log_likelihood / batch_size + 1e-4 * l2_regulariser


@jax.jit
def evaluate(params, batch):
    logits = network.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@jax.jit
def update(state, batch):
    TRACED.append("update")
    value, grads = jax.value_and_grad(loss)(state.params, batch)
    updates, opt_state = optimiser.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    avg_params = optax.incremental_update(params, state.avg_params, step_size=0.1)
    return TrainingState(params, avg_params, opt_state), value


initial_params = network.init(jax.random.key(0), batches[0]["image"])
initial_opt_state = optimiser.init(initial_params)
state = TrainingState(initial_params, initial_params, initial_opt_state)

for batch in batches:
    state, value = update(state, batch)
    losses.append(float(value))
losses.append(float(evaluate(state.avg_params, batches[0])))
