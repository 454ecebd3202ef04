"""The program of the LoRA of flax's optimization cookbook: layers get adapters, and `nnx.LoRAParam` alone is moved."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

rng = np.random.default_rng(0)
inputs, targets = rng.normal(size=(2, 64, 8)).astype(np.float32)
batches = [{"x": inputs[i : i + 16], "y": targets[i : i + 16]} for i in range(0, 64, 16)]
TRACED, losses = [], []
rngs = nnx.Rngs(0)


def make_model(rngs):
    return nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs))


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def add_rank2_lora(_, node):
    if isinstance(node, nnx.Linear):
        return nnx.LoRA(node.in_features, 2, node.out_features, base_module=node, rngs=rngs)
    return node


base_model = make_model(rngs)
model = nnx.recursive_map(add_rank2_lora, base_model)
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)


@nnx.jit
def train_step(model, optimizer, x, y):
    TRACED.append("train_step")
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


for batch in batches:
    losses.append(float(train_step(model, optimizer, batch["x"], batch["y"])))
losses.append(float(loss_fn(model, batches[0]["x"], batches[0]["y"])))
