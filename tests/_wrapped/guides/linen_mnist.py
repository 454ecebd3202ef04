"""The program of flax's linen example for MNIST, with `TrainState`, on small images that it makes."""

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

rng = np.random.default_rng(0)
images, labels = rng.normal(size=(64, 8, 8, 1)).astype(np.float32), rng.integers(10, size=64).astype(np.int32)
batches = [{"image": images[i : i + 16], "label": labels[i : i + 16]} for i in range(0, 64, 16)]
TRACED, losses = [], []


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(features=16)(x.reshape((x.shape[0], -1))))
        return nn.Dense(features=10)(x)


cnn = CNN()
variables = cnn.init(jax.random.key(0), images[:1])
state = TrainState.create(apply_fn=cnn.apply, params=variables["params"], tx=optax.adamw(0.005, 0.9))


def loss_fn(params, batch):
    logits = state.apply_fn({"params": params}, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"]).mean()


@jax.jit
def train_step(state, batch):
    TRACED.append("train_step")
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


for batch in batches:
    state, loss = train_step(state, batch)
    losses.append(float(loss))
losses.append(float(loss_fn(state.params, batches[0])))
