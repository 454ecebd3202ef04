"""What a gradient keeps between its two passes: to keep less, and to see what is kept.

The policies of ``jax.checkpoint`` choose by operation or by name. But the very same ``add`` or ``transpose`` makes a
weight here and an activation there, and the names stand in networks that are not yours. What tells them apart is what
they are made of: a value made of parameters and keys alone can be made again from these, which lie in memory anyway. So
the loss is cut in two programs, and its derivative is written with them:

>>> import jax, jax.numpy as jnp, reparax as rpx
>>> def early(w, key):  # all that comes from parameters and key alone
...     noisy = w + 0.1 * jax.random.normal(key, w.shape)
...     return noisy, noisy.T
>>> def late(weights, x):  # the rest
...     return jnp.sum(jnp.tanh(x @ weights[0]) @ weights[1])
>>> def loss(w, key, x):  # what you write; the two are found in it, wherever their lines stand
...     return late(early(w, key), x)
>>> args = jnp.ones((64, 2)), jax.random.key(0), jnp.ones((8, 64))
>>> rpx.saved(loss, *args).bytes("weights"), rpx.saved(rpx.remat(loss), *args).bytes("weights")
(512, 0)

The late half is linearized where it stands. Of its residuals, what comes from ``x`` is kept as without ``remat``: here
``x`` and what ``tanh`` needs. The others are outputs of the early half, here ``noisy.T``; they are not kept, and the
backward pass runs the early half again, and its derivative. No product of ``late`` runs twice.

Both passes run in an order of their own: what comes from the early half is made just before the late half uses it.

``_bodies`` opens programs inside of programs, ``_lazily`` orders one, ``_residuals`` and ``_derivative`` write the
derivative, ``_linear`` its transpose, and ``_piece`` is the kind of equation that both are.
"""

from reparax.memory._remat import remat as remat
from reparax.memory._saved import Saved as Saved
from reparax.memory._saved import saved as saved
