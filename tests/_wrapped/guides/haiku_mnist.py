"""The program of haiku's MNIST example, on small images that it makes: a loss with L2, Adam, averaged parameters."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

rng = np.random.default_rng(0)
images, labels = rng.normal(size=(64, 8, 8, 1)).astype(np.float32), rng.integers(10, size=64).astype(np.int32)
batches = [{"image": images[i : i + 16], "label": labels[i : i + 16]} for i in range(0, 64, 16)]
TRACED, losses = [], []


def net_fn(batch):
    mlp = hk.Sequential([hk.Flatten(), hk.Linear(16), jax.nn.relu, hk.Linear(10)])
    return mlp(batch["image"])


net = hk.without_apply_rng(hk.transform(net_fn))
opt = optax.adam(0.005)


def loss(params, batch):
    logits = net.apply(params, batch)
    l2_loss = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    softmax_xent = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return softmax_xent + 1e-4 * l2_loss


@jax.jit
def update(params, opt_state, batch):
    TRACED.append("update")
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = opt.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, value


@jax.jit
def ema_update(params, avg_params):
    return optax.incremental_update(params, avg_params, step_size=0.1)


params = avg_params = net.init(jax.random.key(42), batches[0])
opt_state = opt.init(params)

for batch in batches:
    params, opt_state, value = update(params, opt_state, batch)
    avg_params = ema_update(params, avg_params)
    losses.append(float(value))
losses.append(float(loss(avg_params, batches[0])))
