"""Adapters without materializing the weight.

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

A weight is a sum of products of smaller arrays (``_weights``). It starts where arrays of named arguments are
multiplied, or where a stage declares its terms (``_declared``). Transposes, casts and slices of it act on its factors.
Products with data multiply by one factor after the other (``_uses``). Sums also go into the bodies of loops, calls and
shards. ``_factoring`` says what the reader of programs does with weights. It reads the program twice: first by types
alone, to record what reads each weight, so that ``_plan`` can choose the cheaper way; then to compute.
"""
