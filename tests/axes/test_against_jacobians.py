"""Axes that nobody set, in layers of nnx and equinox, against numeric Jacobians."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from axes.networks import KEY, drawn
from flax import nnx

import reparax as rpx
from reparax.core.paths import items, path_text


def stacked_nnx(count, axis, make):
    """Layers that are stacked along an axis."""
    return drawn(lambda: nnx.vmap(make, out_axes=axis)(nnx.Rngs(0).split(count)))


def each_nnx(axis):
    """A call of each of these layers, with inputs of its own."""
    return nnx.vmap(lambda layer, x: layer(x), in_axes=(axis, 0))


def of_linear(rngs):
    return nnx.Linear(4, 6, rngs=rngs)


def of_heads(rngs):
    return nnx.LinearGeneral(4, (2, 3), rngs=rngs)


def stacked_equinox():
    return eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 6, key=key), out_axes=1)(jax.random.split(KEY, 5))


def turned():
    return nnx.ConvTranspose(3, 3, (3,), transpose_kernel=True, rngs=nnx.Rngs(0))


# A layer, its call, the shape of its inputs.
LAYERS = {
    "in front": (stacked_nnx(5, 0, of_linear), each_nnx(0), (5, 4)),
    "in the middle": (stacked_nnx(5, 1, of_linear), each_nnx(1), (5, 4)),
    "behind": (stacked_nnx(5, 2, lambda rngs: nnx.Linear(4, 6, use_bias=False, rngs=rngs)), each_nnx(2), (5, 4)),
    "as many as outputs": (stacked_nnx(6, 0, of_linear), each_nnx(0), (6, 4)),
    "heads": (stacked_nnx(5, 1, of_heads), each_nnx(1), (5, 4)),
    "equinox": (drawn(stacked_equinox), eqx.filter_vmap(lambda m, x: m(x), in_axes=(1, 0)), (5, 4)),
    "experts": (
        drawn(lambda: nnx.Einsum("ei,ioe->eo", (3, 3, 3), None, rngs=nnx.Rngs(0))),
        lambda m, x: m(x),
        (3, 3),
    ),
    "a square kernel of a window as long": (drawn(turned), lambda m, x: m(x[None])[0, 2], (5, 3)),
    "channels first": (
        drawn(lambda: eqx.nn.Conv1d(3, 3, 3, key=KEY)),
        lambda m, x: m(x)[:, 1],
        (3, 5),
    ),
}


def sizes_of_kept_axes(layer, call, shape):
    """For each array the sizes of the axes along which the outputs differ that an entry moves, and 1 for all others."""
    graph, arrays = nnx.split(layer) if isinstance(layer, nnx.Module) else (None, eqx.filter(layer, eqx.is_array))

    def outputs(arrays, x):
        model = eqx.combine(arrays, layer) if graph is None else nnx.merge(graph, arrays, copy=True)
        return jnp.ravel(call(model, x.reshape(shape)))

    ones = jnp.eye(int(np.prod(shape)))
    jacobians = jax.vmap(jax.jacrev(outputs), (None, 0))(arrays, ones)
    return {path_text(path): moved for path, moved in items(jax.tree.map(lambda x: jnp.any(x != 0, 0), jacobians))}


def test_lengths_lie_along_the_axes_that_the_outputs_follow():
    with jax.numpy_rank_promotion("allow"):  # layers of nnx add biases so
        found = jax.jit(lambda: {name: sizes_of_kept_axes(*case) for name, case in LAYERS.items()})()
    for name, (layer, *_) in LAYERS.items():
        raw = {path_text(path): x for path, x in items(jax.eval_shape(rpx.WeightNorm().init, layer))}
        lengths = {path.removesuffix("/@weight_norm/g"): x.shape for path, x in raw.items() if path.endswith("/g")}
        assert lengths, name
        for path, shape in lengths.items():
            moved = np.asarray(found[name][path])  # outputs first
            axes = range(1, moved.ndim)
            kept = tuple(moved.shape[i] if (moved != np.roll(moved, 1, i)).any() else 1 for i in axes)
            assert shape == kept, (name, path)
