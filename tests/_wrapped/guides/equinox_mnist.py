"""The program of equinox's MNIST tutorial, on small images that it makes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

rng = np.random.default_rng(0)
images, labels = rng.normal(size=(64, 64)).astype(np.float32), rng.integers(10, size=64).astype(np.int32)
batches = [{"image": images[i : i + 16], "label": labels[i : i + 16]} for i in range(0, 64, 16)]
TRACED, losses = [], []

model = eqx.nn.MLP(64, 10, 16, 1, key=jax.random.key(0))
optim = optax.adamw(0.005, weight_decay=0.1)


def loss_fn(model, batch):
    logits = jax.vmap(model)(batch["image"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))


@eqx.filter_jit
def make_step(model, opt_state, batch):
    TRACED.append("make_step")
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
for batch in batches:
    model, opt_state, loss = make_step(model, opt_state, batch)
    losses.append(float(loss))
losses.append(float(loss_fn(model, batches[0])))
