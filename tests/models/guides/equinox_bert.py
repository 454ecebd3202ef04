"""The program of equinox's BERT example, small: an encoder with dropout, and a key for each example of each step."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

rng = np.random.default_rng(0)
tokens, labels = rng.integers(20, size=(64, 6)).astype(np.int32), rng.integers(2, size=64).astype(np.int32)
batches = [{"token_ids": tokens[i : i + 16], "label": labels[i : i + 16]} for i in range(0, 64, 16)]
TRACED, losses = [], []


class Classifier(eqx.Module):
    embedding: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(20, 8, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.Linear(8, 2, key=keys[2])

    def __call__(self, inputs, enable_dropout=True, key=None):
        x = jax.vmap(self.embedding)(inputs["token_ids"])
        x = self.dropout(x + self.attention(x, x, x), inference=not enable_dropout, key=key)
        return self.head(x[0])


model_key, train_key = jax.random.split(jax.random.key(5678))
classifier = Classifier(model_key)


@eqx.filter_value_and_grad
def compute_loss(classifier, inputs, key):
    batch_size = inputs["token_ids"].shape[0]
    batched_keys = jax.random.split(key, num=batch_size)
    logits = jax.vmap(classifier, in_axes=(0, None, 0))(inputs, True, batched_keys)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=inputs["label"]))


def make_step(model, inputs, opt_state, key, tx):
    TRACED.append("make_step")
    key, new_key = jax.random.split(key)
    loss, grads = compute_loss(model, inputs, key)
    updates, opt_state = tx.update(grads, opt_state, model)
    model = eqx.apply_updates(model, updates)
    return loss, model, opt_state, new_key


def make_eval_step(model, inputs):
    return jax.vmap(functools.partial(model, enable_dropout=False))(inputs)


tx = optax.adam(learning_rate=0.005)
tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
opt_state = tx.init(eqx.filter(classifier, eqx.is_inexact_array))
p_make_step = eqx.filter_jit(functools.partial(make_step, tx=tx))

model = classifier
for batch in batches:
    loss, model, opt_state, train_key = p_make_step(model, batch, opt_state, train_key)
    losses.append(float(loss))
outputs = eqx.filter_jit(make_eval_step)(model, batches[0])
losses.append(float(optax.softmax_cross_entropy_with_integer_labels(outputs, batches[0]["label"]).mean()))
