"""Products that never form the weight.

If you form a weight such as ``W + A B``, integers times scales, or a direction times a length, each product and each
gradient costs its full size. This is not necessary. A product is linear in the weight, so it can multiply by one factor
after the other, in the cheapest order. You need not rewrite the network: the jaxpr of the loss shows which
arrays are multiplied.

>>> import jax, jax.numpy as jnp, reparax as rpx
>>> p = rpx.Freeze() >> rpx.LoRA(8)
>>> raw = p.init({"w": jnp.ones((512, 512))}, jax.random.key(0))
>>> train, rest = rpx.partition(raw)
>>> def loss(train, x):
...     return jnp.sum(jnp.tanh(x @ p.apply(rpx.combine(train, rest))["w"]))
>>> def operations(loss):
...     step = jax.jit(jax.grad(loss)).lower(train, jnp.ones((1024, 512)))
...     return step.compile().cost_analysis()["flops"]
>>> operations(rpx.factored(loss)) < 0.6 * operations(loss)
True

A weight is a sum of products of smaller arrays (``_sums``). It starts where arrays of named arguments are multiplied
(``_makers``), or where a stage declares its terms (``_told``). Transposes, casts and slices of it act on its factors
(``_moves``). Products with data multiply by one factor after the other (``_uses``). Sums also go into the bodies of
loops, calls and shards (``_bodies``). ``_multiply`` finds the best order and its cost. ``_reader`` follows
weights through a program, and ``_factoring`` says what to do with them. The program is evaluated twice: first to record
what reads each weight, so that ``_plan`` can choose the cheaper way; then to compute.

With noise on a weight, the same rules follow its mean and its draws to the products with data, where each row of the
result draws for itself: ``_drawing`` says what to do, and ``_noisy`` computes means and variances.
"""

from reparax.products._explained import Explained as Explained
from reparax.products._explained import explain as explain
from reparax.products._explained_draws import ExplainedDraws as ExplainedDraws
from reparax.products._factored import factored as factored
from reparax.products._inputs import inputs as inputs
from reparax.products._local import local as local
