"""The program of flax's quick start for linen, on small images that it makes: `TrainState` with metrics, two steps."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

rng = np.random.default_rng(0)
images, labels = rng.normal(size=(64, 8, 8, 1)).astype(np.float32), rng.integers(10, size=64).astype(np.int32)
batches = [{"image": images[i : i + 16], "label": labels[i : i + 16]} for i in range(0, 64, 16)]
TRACED, losses = [], []


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=8, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.Dense(features=16)(x)
        x = nn.relu(x)
        return nn.Dense(features=10)(x)


cnn = CNN()


class TrainState(train_state.TrainState):
    metrics: Any


def create_train_state(module, rng, learning_rate, momentum):
    params = module.init(rng, jnp.ones([1, 8, 8, 1]))["params"]
    tx = optax.sgd(learning_rate, momentum)
    return TrainState.create(apply_fn=module.apply, params=params, tx=tx, metrics={"loss": 0.0})


@jax.jit
def train_step(state, batch):
    TRACED.append("train_step")

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"]).mean()

    grads = jax.grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads)


@jax.jit
def compute_metrics(*, state, batch):
    logits = state.apply_fn({"params": state.params}, batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"]).mean()
    return state.replace(metrics={"loss": loss})


state = create_train_state(cnn, jax.random.key(0), 0.1, 0.9)

for batch in batches:
    state = compute_metrics(state=state, batch=batch)
    losses.append(float(state.metrics["loss"]))
    state = train_step(state, batch)
state = compute_metrics(state=state, batch=batches[0])
losses.append(float(state.metrics["loss"]))
