"""The program of flax's guide to batch normalization for linen: a `TrainState` that holds what the loss passes on."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training import train_state

rng = np.random.default_rng(0)
images, labels = rng.normal(size=(64, 8)).astype(np.float32), rng.integers(4, size=64).astype(np.int32)
batches = [{"image": images[i : i + 16], "label": labels[i : i + 16]} for i in range(0, 64, 16)]
TRACED, losses = [], []


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(features=16)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(x)
        return nn.Dense(features=4)(x)


mlp = MLP()
variables = mlp.init(jax.random.key(0), images[:1], train=False)
params = variables["params"]
batch_stats = variables["batch_stats"]


class TrainState(train_state.TrainState):
    batch_stats: Any


state = TrainState.create(apply_fn=mlp.apply, params=params, batch_stats=batch_stats, tx=optax.adam(1e-2))


@jax.jit
def train_step(state, batch):
    TRACED.append("train_step")

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, x=batch["image"], train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"]).mean()
        return loss, (logits, updates)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (_, updates)), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads)
    return state.replace(batch_stats=updates["batch_stats"]), loss


@jax.jit
def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, x=batch["image"], train=False)
    return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"]).mean()


for batch in batches:
    state, loss = train_step(state, batch)
    losses.append(float(loss))
losses.append(float(eval_step(state, batches[0])))
