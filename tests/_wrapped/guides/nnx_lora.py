"""The program of flax's guide to LoRA: a base is taken over, and `nnx.LoRAParam` alone is differentiated and moved."""

import numpy as np
import optax
from flax import nnx

rng = np.random.default_rng(0)
inputs, targets = rng.normal(size=(2, 64, 8)).astype(np.float32)
batches = [{"x": inputs[i : i + 16], "y": targets[i : i + 16]} for i in range(0, 64, 16)]
TRACED, losses = [], []


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.linear1 = nnx.Linear(8, 16, rngs=rngs)
        self.linear2 = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.linear2(nnx.relu(self.linear1(x)))


model = MLP(nnx.Rngs(0))
model.linear1 = nnx.LoRA(8, 2, 16, base_module=model.linear1, rngs=nnx.Rngs(1))
optimizer = nnx.Optimizer(model, optax.adamw(0.01, weight_decay=0.1), wrt=nnx.LoRAParam)


def loss_fn(model, batch):
    return optax.l2_loss(model(batch["x"]), batch["y"]).mean()


@nnx.jit
def train_step(model, optimizer, batch):
    TRACED.append("train_step")
    loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)
    optimizer.update(model, grads)
    return loss


for batch in batches:
    losses.append(float(train_step(model, optimizer, batch)))
losses.append(float(loss_fn(model, batches[0])))
