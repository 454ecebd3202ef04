"""Programs that several test files run: compiled once for each parametrization and shape."""

import jax


@jax.jit
def read(p, raw):
    """What the model reads."""
    return p.apply(raw)["w"]


@jax.jit
def pulled(p, raw, dw):
    """The gradient of the raw values of ``w`` where ``dw`` is that of the effective array."""
    return jax.vjp(p.apply, raw)[1]({"w": dw})[0]["w"]
