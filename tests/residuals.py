"""What a gradient keeps, measured with JAX's own dead-code elimination and not with the library's analysis."""

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr


def kept(f, raw, key, *data):
    """Bytes kept for the gradient in ``raw``: those made from ``raw`` and ``key`` alone, and all others."""

    def residuals(raw, key, *data):
        return jax.tree.leaves(jax.vjp(lambda raw: f(raw, key, *data), raw)[1])

    closed = jax.make_jaxpr(residuals)(raw, key, *data)
    jaxpr = closed.jaxpr
    n_free = len(jax.tree.leaves((raw, key)))
    bytes_of = {"weights": 0, "others": 0}
    for v in dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, Literal)):
        if v in jaxpr.invars[:n_free] or v in jaxpr.constvars:
            continue
        used = dce_jaxpr(jaxpr.replace(outvars=[v]), [True])[1]
        bytes_of["others" if any(used[n_free:]) else "weights"] += _bytes(v.aval)
    return bytes_of


def _bytes(aval):
    typed = jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return aval.size * (8 if typed else aval.dtype.itemsize)


def contractions(f, *args):
    """How many matmuls and convolutions a program holds."""
    return sum(eqn.primitive.name in ("dot_general", "conv_general_dilated") for eqn, _ in _equations(f, *args))


def draws(f, *args):
    """How many draws a program holds, each of which reads the words of a key, and how many in the steps of a scan.

    A scan over keys is how several arrays are drawn, each once.
    """
    inside = [in_scan for eqn, in_scan in _equations(f, *args) if eqn.primitive.name == "random_unwrap"]
    return len(inside), sum(inside)


def _takes_steps(eqn):
    if eqn.primitive.name != "scan":
        return False
    pairs = zip(eqn.invars, eqn.params["jaxpr"].jaxpr.invars, strict=True)
    steps = [x for x, inside in pairs if x.aval.ndim > inside.aval.ndim]
    return not any(jnp.issubdtype(x.aval.dtype, jax.dtypes.prng_key) for x in steps)


def _equations(f, *args):
    """Each equation of a program, here and inside of others, and whether it is in the steps of a scan."""

    def visited(jaxpr, *, in_scan):
        for eqn in jaxpr.eqns:
            yield eqn, in_scan
            for value in eqn.params.values():
                for x in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(x, Jaxpr | ClosedJaxpr):
                        yield from visited(getattr(x, "jaxpr", x), in_scan=in_scan or _takes_steps(eqn))

    return visited(jax.make_jaxpr(f)(*args).jaxpr, in_scan=False)
