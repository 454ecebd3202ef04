"""Products that never form the weight.

A weight that is ``W + A B``, or integers times scales, or a direction times a length, costs its full size in each
product and each gradient when it is formed. It need not be. A product is linear in the weight, so it can be taken
factor by factor, in the order that costs least. No network has to be written anew for that: the program of the loss
tells what is multiplied by what.

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

A weight is a sum of products of smaller arrays (``_sums``). It begins where arrays of named arguments are multiplied
(``_makers``), or where a stage tells its terms (``_told``); transposing, casting or cutting it does so to its factors
(``_moves``); products of data read it factor by factor (``_uses``); and it goes into the bodies of loops, calls and
shards (``_bodies``). ``_multiply`` knows the best order and its cost. The program is evaluated twice (``_reader``):
first to note what reads each weight, by which a ``_plan`` says what is cheaper; then for good.
"""

from reparax.factored._explained import Explained as Explained
from reparax.factored._explained import explain as explain
from reparax.factored._factored import factored as factored
