"""The program of equinox's BERT example, small: an encoder with dropout, and a key for each example of each step."""

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

    def __call__(self, token_ids, *, enable_dropout=False, key=None):
        x = jax.vmap(self.embedding)(token_ids)
        x = self.dropout(x + self.attention(x, x, x), inference=not enable_dropout, key=key)
        return self.head(x[0])


classifier = Classifier(jax.random.key(0))
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.005, weight_decay=0.1))


def compute_loss(classifier, inputs, key):
    batch_keys = jax.random.split(key, num=16)
    logits = jax.vmap(lambda x, key: classifier(x, enable_dropout=True, key=key))(inputs["token_ids"], batch_keys)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=inputs["label"]))


@eqx.filter_jit
def make_step(model, inputs, opt_state, key):
    TRACED.append("make_step")
    key, new_key = jax.random.split(key)
    loss, grads = eqx.filter_value_and_grad(compute_loss)(model, inputs, key)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return loss, eqx.apply_updates(model, updates), opt_state, new_key


opt_state, key = tx.init(eqx.filter(classifier, eqx.is_inexact_array)), jax.random.key(1)
for batch in batches:
    loss, classifier, opt_state, key = make_step(classifier, batch, opt_state, key)
    losses.append(float(loss))
losses.append(float(compute_loss(classifier, batches[0], key)))
