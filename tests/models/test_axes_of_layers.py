"""The axes of the arrays of layers of nnx and equinox, letter by letter and size by size."""

import equinox as eqx
import jax
import pytest
from flax import nnx

from reparax.models import _equinox_layers, _nnx_layers

KEY = jax.random.key(0)


def without_equation(rngs):
    """A layer that gets its equation in each call."""
    layer = nnx.Einsum("bi,io->bo", (3, 2), (2,), rngs=rngs)
    layer.einsum_str = None
    return layer


VECTORS = {"scale": ("v", None), "bias": ("v", None)}
OF_NNX = {
    "linear": (lambda r: nnx.Linear(3, 2, rngs=r), {"kernel": ("io", 3, 2), "bias": ("v", 2)}),
    "linear with an adapter": (
        lambda r: nnx.LoRALinear(3, 2, lora_rank=4, rngs=r),
        {"kernel": ("io", 3, 2), "bias": ("v", 2)},
    ),
    "heads": (
        lambda r: nnx.LinearGeneral(3, (2, 4), rngs=r),
        {"kernel": ("sio", (), (3,), (2, 4)), "bias": ("sv", (), (2, 4))},
    ),
    "a batch": (
        lambda r: nnx.LinearGeneral(3, 2, batch_axis={0: 6}, rngs=r),
        {"kernel": ("sio", (6,), (3,), (2,)), "bias": ("sv", (6,), (2,))},
    ),
    "einsum": (
        lambda r: nnx.Einsum("bi,io->bo", (3, 2), (2,), rngs=r),
        {"kernel": ("io", 3, 2), "bias": ("v", (2,))},
    ),
    "einsum, transposed": (lambda r: nnx.Einsum("oi,bi->bo", (2, 3), rngs=r), {"kernel": ("oi", 2, 3)}),
    "einsum of experts": (lambda r: nnx.Einsum("bei,eio->beo", (4, 3, 2), rngs=r), {"kernel": ("sio", 4, 3, 2)}),
    "einsum with a sum over the kernel alone": (lambda r: nnx.Einsum("bi,ij->bi", (3, 2), rngs=r), {}),
    "einsum of a diagonal": (lambda r: nnx.Einsum("bi,ii->bi", (3, 3), rngs=r), {}),
    "einsum without an equation": (lambda r: without_equation(r), {"bias": ("v", (2,))}),
    "convolution": (
        lambda r: nnx.Conv(4, 6, (3, 5), feature_group_count=2, rngs=r),
        {"kernel": ("wio", (3, 5), 2, 6), "bias": ("v", 6)},
    ),
    "convolution of one window": (
        lambda r: nnx.Conv(4, 6, 3, rngs=r),
        {"kernel": ("wio", (3,), 4, 6), "bias": ("v", 6)},
    ),
    "transposed": (
        lambda r: nnx.ConvTranspose(4, 6, (3,), rngs=r),
        {"kernel": ("wio", (3,), 4, 6), "bias": ("v", 6)},
    ),
    "transposed twice": (
        lambda r: nnx.ConvTranspose(4, 6, (3,), transpose_kernel=True, rngs=r),
        {"kernel": ("woi", (3,), 6, 4), "bias": ("v", 6)},
    ),
    "adapter": (lambda r: nnx.LoRA(3, 4, 2, rngs=r), {"lora_a": ("io", 3, None), "lora_b": ("io", None, 2)}),
    "table": (lambda r: nnx.Embed(7, 5, rngs=r), {"embedding": ("ro", 7, 5)}),
    "norm": (lambda r: nnx.BatchNorm(3, rngs=r), VECTORS),
}
CONVOLUTION = {"weight": ("oiw", 6, 2, (3, 5)), "bias": ("vv", 6, (1, 1))}
OF_EQUINOX = {
    "linear": (lambda: eqx.nn.Linear(3, 2, key=KEY), {"weight": ("oi", 2, 3), "bias": ("v", 2)}),
    "of a scalar": (lambda: eqx.nn.Linear("scalar", 2, key=KEY), {"weight": ("oi", 2, 1), "bias": ("v", 2)}),
    "to a scalar": (lambda: eqx.nn.Linear(3, "scalar", key=KEY), {"weight": ("oi", 1, 3), "bias": ("v", 1)}),
    "convolution": (lambda: eqx.nn.Conv2d(4, 6, (3, 5), groups=2, key=KEY), CONVOLUTION),
    "transposed": (lambda: eqx.nn.ConvTranspose2d(4, 6, (3, 5), groups=2, key=KEY), CONVOLUTION),
    "table": (lambda: eqx.nn.Embedding(7, 5, key=KEY), {"weight": ("ro", 7, 5)}),
    "gru": (
        lambda: eqx.nn.GRUCell(3, 4, key=KEY),
        {"weight_ih": ("oi", 12, 3), "weight_hh": ("oi", 12, 4), "bias": ("v", 12), "bias_n": ("v", 4)},
    ),
    "lstm": (
        lambda: eqx.nn.LSTMCell(3, 4, key=KEY),
        {"weight_ih": ("oi", 16, 3), "weight_hh": ("oi", 16, 4), "bias": ("v", 16), "bias_n": ("v", 4)},
    ),
    "norm": (lambda: eqx.nn.LayerNorm((3, 2)), {"weight": ("v", (3, 2)), "bias": ("v", (3, 2))}),
    "norm of groups": (lambda: eqx.nn.GroupNorm(2, 4), {"weight": ("v", None), "bias": ("v", None)}),
}


def axes_in(layers, module):
    """What the table says of a module, by the first of its classes that is there."""
    return next(layers[cls.__name__](module) for cls in type(module).__mro__ if cls.__name__ in layers)


@pytest.mark.parametrize(("make", "axes"), OF_NNX.values(), ids=OF_NNX)
def test_axes_of_layers_of_nnx(make, axes):
    assert axes_in(_nnx_layers.LAYERS, nnx.eval_shape(lambda: make(nnx.Rngs(0)))) == axes


@pytest.mark.parametrize(("make", "axes"), OF_EQUINOX.values(), ids=OF_EQUINOX)
def test_axes_of_layers_of_equinox(make, axes):
    assert axes_in(_equinox_layers.LAYERS, eqx.filter_eval_shape(make)) == axes
