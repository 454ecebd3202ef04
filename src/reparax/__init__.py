"""Functional parametrization for JAX: one line defines how weights are computed from the trained parameters.

``p = rpx.WeightNorm() >> rpx.VarNoise(0.075)``, ``raw = p.init(params)``, and ``p.apply(raw, key)`` in the loss.

The names that most programs use are here. Their families have more, and ``help(rpx.norms)`` lists them:

``rpx.norms``      lengths of weights: ``WeightNorm``, ``SpectralNorm``, spheres
``rpx.noise``      noise, dropout, distributions and casts: ``VarNoise``, ``WeightDropout``, ``Gaussian``, ``Cast``
``rpx.numbers``    single numbers: ``Positive``, ``Bounded``, ``Scale``
``rpx.matrices``   constrained matrices: ``Orthogonal``, ``LowRank``, ``PositiveDefinite``, patterns
``rpx.sparse``     masked, pruned and frozen weights: ``Freeze``, ``Mask``, ``MagnitudePrune``
``rpx.shared``     tied arrays, and layouts of recurrent cells: ``Tie``, ``Pack``, ``convert``
``rpx.adapters``   small differences that train: ``LoRA``, ``Delta``, ``Gain``
``rpx.quantized``  few bits: ``Stored``, ``Quantize``
``rpx.training``   which values train, and their optimizer: ``partition``, ``optimizer``, ``transfer``
``rpx.memory``     less memory for the backward pass: ``remat``, ``saved``
``rpx.products``   adapters without materializing the weight: ``factored``, ``explain``
``rpx.draws``      separate noise for each example: ``local``
``rpx.geometry``   axes of weights, read from the network: ``roles``, ``axis_groups``, ``shrink``
``rpx.torch``      state dicts and quantized files: ``from_torch``, ``to_torch``
``rpx.peft``       adapters of PEFT: ``from_peft``, ``to_peft``
``rpx.nnx``        a flax nnx model that contains its chain, for trainers that own the loss: ``Parametrized``
``rpx.linen``      the same for flax linen: ``parametrized``
``rpx.equinox``    the same for equinox: ``Parametrized``
``rpx.haiku``      the same for haiku: ``parametrized``
``rpx.stage``      for stages of your own: ``Reparametrization``, ``argument``, ``main``
``reparax.testing``  the laws that your stages must keep; import it explicitly

``nnx``, ``linen``, ``equinox`` and ``haiku`` are imported on first use, because each needs its library.
"""

import importlib as _importlib
import typing as _typing

from reparax import adapters as adapters
from reparax import draws as draws
from reparax import geometry as geometry
from reparax import matrices as matrices
from reparax import memory as memory
from reparax import noise as noise
from reparax import norms as norms
from reparax import numbers as numbers
from reparax import peft as peft
from reparax import products as products
from reparax import quantized as quantized
from reparax import shared as shared
from reparax import sparse as sparse
from reparax import stage as stage
from reparax import torch as torch
from reparax import training as training
from reparax._core.names import LIBRARIES as _LIBRARIES
from reparax._core.names import unknown_name_error as _unknown_name
from reparax.adapters import Delta as Delta
from reparax.adapters import Gain as Gain
from reparax.adapters import LoRA as LoRA
from reparax.draws import local as local
from reparax.geometry import axis_groups as axis_groups
from reparax.geometry import roles as roles
from reparax.geometry import shrink as shrink
from reparax.matrices import LowRank as LowRank
from reparax.matrices import Orthogonal as Orthogonal
from reparax.memory import remat as remat
from reparax.memory import saved as saved
from reparax.noise import Cast as Cast
from reparax.noise import Gaussian as Gaussian
from reparax.noise import VarNoise as VarNoise
from reparax.noise import WeightDropout as WeightDropout
from reparax.norms import SpectralNorm as SpectralNorm
from reparax.norms import WeightNorm as WeightNorm
from reparax.numbers import Bounded as Bounded
from reparax.numbers import Positive as Positive
from reparax.numbers import Scale as Scale
from reparax.peft import from_peft as from_peft
from reparax.peft import to_peft as to_peft
from reparax.products import explain as explain
from reparax.products import factored as factored
from reparax.quantized import Quantize as Quantize
from reparax.quantized import Stored as Stored
from reparax.shared import Tie as Tie
from reparax.sparse import Freeze as Freeze
from reparax.sparse import MagnitudePrune as MagnitudePrune
from reparax.sparse import Mask as Mask
from reparax.stage import Chain as Chain
from reparax.stage import Parametrization as Parametrization
from reparax.stage import Perturbation as Perturbation
from reparax.stage import Reparametrization as Reparametrization
from reparax.stage import all_but as all_but
from reparax.stage import from_json as from_json
from reparax.stage import selected as selected
from reparax.torch import from_torch as from_torch
from reparax.torch import to_torch as to_torch
from reparax.training import combine as combine
from reparax.training import decay_mask as decay_mask
from reparax.training import labels as labels
from reparax.training import optimizer as optimizer
from reparax.training import partition as partition
from reparax.training import summary as summary
from reparax.training import transfer as transfer

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:
    from reparax import equinox as equinox
    from reparax import haiku as haiku
    from reparax import linen as linen
    from reparax import nnx as nnx
else:  # where a type checker would believe that there is every name

    def __getattr__(name: str) -> object:
        if name in _LIBRARIES:
            return _importlib.import_module(f"reparax.{name}")
        raise _unknown_name(name, globals())
