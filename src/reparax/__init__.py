"""Functional parametrization for JAX: one line defines how weights are computed from the trained parameters.

``p = rpx.WeightNorm() >> rpx.VarNoise(0.075)``, ``raw = p.init(params)``, and ``p.apply(raw, key)`` in the loss.

The names that most programs need are at the top level, such as ``rpx.WeightNorm``. Each family is a module with more
names, which ``dir`` lists, for example ``dir(rpx.norms)``:

``rpx.norms``       lengths of weights: ``WeightNorm``, ``SpectralNorm``, spheres
``rpx.noise``       noise, dropout and distributions: ``VarNoise``, ``WeightDropout``, ``Gaussian``
``rpx.numbers``     single numbers: ``Positive``, ``Bounded``, ``Scale``
``rpx.matrices``    constrained matrices: ``Orthogonal``, ``LowRank``, ``PositiveDefinite``, patterns
``rpx.sparse``      masked, pruned and frozen weights: ``Freeze``, ``Mask``, ``MagnitudePruning``
``rpx.shared``      tied arrays, and layouts of recurrent cells: ``Tie``, ``Pack``, ``convert``
``rpx.adapters``    small trainable differences: ``LoRA``, ``Delta``, ``Gain``
``rpx.quantized``   few bits: ``Quantized``, ``FakeQuantized``, ``Cast``
``rpx.training``    which values train, and their optimizer: ``partition``, ``optimizer``, ``transfer``
``rpx.transforms``  functions of a loss: ``remat``, ``factored``, ``explain`` and more
``rpx.axes``        axes of weights, read from the network: ``roles``, ``check_axes``
``rpx.io``          files of torch and PEFT: ``from_torch``, ``to_torch``, ``from_peft``, ``to_peft``
``rpx.nnx``         a flax nnx model that contains its chain, for trainers that own the loss: ``Parametrized``
``rpx.linen``       the same for flax linen: ``parametrized``
``rpx.equinox``     the same for equinox: ``Parametrized``
``rpx.haiku``       the same for haiku: ``parametrized``
``rpx.stage``       for stages of your own: ``Reparametrization``, ``field``, ``main``
``reparax.testing``  the laws that stages of your own must satisfy; import it explicitly

A family is imported when it is first used; ``nnx``, ``linen``, ``equinox`` and ``haiku`` need their libraries.
"""

import typing as _typing

from reparax.core import names as _names

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:  # for editors and type checkers, which cannot read the tables in `core.names`
    from reparax import axes as axes
    from reparax import io as io
    from reparax import training as training
    from reparax import transforms as transforms
    from reparax.axes import roles as roles
    from reparax.core import stage as stage
    from reparax.core.stage import Chain as Chain
    from reparax.core.stage import Parametrization as Parametrization
    from reparax.core.stage import Perturbation as Perturbation
    from reparax.core.stage import Reparametrization as Reparametrization
    from reparax.core.stage import all_but as all_but
    from reparax.core.stage import from_json as from_json
    from reparax.models import equinox as equinox
    from reparax.models import haiku as haiku
    from reparax.models import linen as linen
    from reparax.models import nnx as nnx
    from reparax.stages import adapters as adapters
    from reparax.stages import matrices as matrices
    from reparax.stages import noise as noise
    from reparax.stages import norms as norms
    from reparax.stages import numbers as numbers
    from reparax.stages import quantized as quantized
    from reparax.stages import shared as shared
    from reparax.stages import sparse as sparse
    from reparax.stages.adapters import LoRA as LoRA
    from reparax.stages.matrices import LowRank as LowRank
    from reparax.stages.matrices import Orthogonal as Orthogonal
    from reparax.stages.noise import Gaussian as Gaussian
    from reparax.stages.noise import VarNoise as VarNoise
    from reparax.stages.noise import WeightDropout as WeightDropout
    from reparax.stages.norms import SpectralNorm as SpectralNorm
    from reparax.stages.norms import WeightNorm as WeightNorm
    from reparax.stages.numbers import Positive as Positive
    from reparax.stages.quantized import FakeQuantized as FakeQuantized
    from reparax.stages.quantized import Quantized as Quantized
    from reparax.stages.shared import Tie as Tie
    from reparax.stages.sparse import Freeze as Freeze
    from reparax.stages.sparse import MagnitudePruning as MagnitudePruning
    from reparax.stages.sparse import Mask as Mask
    from reparax.training import combine as combine
    from reparax.training import decay_mask as decay_mask
    from reparax.training import is_parametrized as is_parametrized
    from reparax.training import optimizer as optimizer
    from reparax.training import partition as partition
    from reparax.training import summary as summary
    from reparax.training import transfer as transfer
    from reparax.transforms import explain as explain
    from reparax.transforms import factored as factored
    from reparax.transforms import remat as remat
else:  # hidden from type checkers, to which `__getattr__` would mean that every name exists
    __all__ = [*_names.TOP, *(name for name in _names.FAMILIES if name not in _names.LIBRARIES)]
    __dir__ = _names.shown_names

    def __getattr__(name: str) -> object:
        globals()[name] = found = _names.load(name)
        return found
