"""Store less for the backward pass, and see what is stored.

The policies of ``jax.checkpoint`` choose by operation or by name. But the same ``add`` or ``transpose`` computes a
weight in one place and an activation in another, and you cannot add names to a network that is not yours. ``remat``
looks at the inputs instead: a value computed from parameters and keys alone can be recomputed from these, which are in
memory anyway. So it splits the loss into two programs, and builds the derivative from them:

>>> import jax, jax.numpy as jnp, reparax as rpx
>>> def early(w, key):  # computed from parameters and key alone
...     noisy = w + 0.1 * jax.random.normal(key, w.shape)
...     return noisy, noisy.T
>>> def late(weights, x):  # the rest
...     return jnp.sum(jnp.tanh(x @ weights[0]) @ weights[1])
>>> def loss(w, key, x):  # what you write; remat finds both halves in it
...     return late(early(w, key), x)
>>> args = jnp.ones((64, 2)), jax.random.key(0), jnp.ones((8, 64))
>>> rpx.saved(loss, *args).bytes("weights"), rpx.saved(rpx.remat(loss), *args).bytes("weights")
(512, 0)

The late half is linearized. Residuals that depend on ``x`` are stored as without ``remat``: here ``x`` and what
``tanh`` needs. The other residuals are outputs of the early half, here ``noisy.T``. They are not stored: the backward
pass runs the early half again, and its derivative. No product of ``late`` runs twice.

In both passes, each output of the early half is computed just before the late half uses it.

``_remat`` begins. ``_derivative`` finds the early half, by the ``Mark`` of each ``apply``, and splits the program;
``_bodies`` opens programs inside programs, ``_sunk`` computes stacked weights in the steps that read them,
``_residuals`` and ``_linear`` build the derivative and its transpose, and ``_piece`` is the primitive that both use.
``_lazily`` orders the equations of a program, ``_ties`` says which must wait, and ``_masks`` which masks are stored.
``_saved`` counts what is kept.
"""
