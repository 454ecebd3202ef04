"""Functional parametrization for JAX: parameters as the optimizer moves them, and as the model reads them."""

from reparax._block import Concat as Concat
from reparax._cast import Cast as Cast
from reparax._constraint import Constraint as Constraint
from reparax._convert import convert as convert
from reparax._core import Chain as Chain
from reparax._core import Parametrization as Parametrization
from reparax._core import from_json as from_json
from reparax._cudnn import CudnnLSTM as CudnnLSTM
from reparax._freeze import Freeze as Freeze
from reparax._global_prune import GlobalPrune as GlobalPrune
from reparax._joint import Joint as Joint
from reparax._layouts import gates as gates
from reparax._leafwise import Perturbation as Perturbation
from reparax._leafwise import Reparametrization as Reparametrization
from reparax._mask import Mask as Mask
from reparax._mask import NofM as NofM
from reparax._matrix import LowRank as LowRank
from reparax._noise import VarNoise as VarNoise
from reparax._noise import WeightDropout as WeightDropout
from reparax._norm import SpectralNorm as SpectralNorm
from reparax._norm import WeightNorm as WeightNorm
from reparax._pack import Pack as Pack
from reparax._pack import Split as Split
from reparax._prune import MagnitudePrune as MagnitudePrune
from reparax._prune import RandomPrune as RandomPrune
from reparax._raw import combine as combine
from reparax._raw import labels as labels
from reparax._raw import partition as partition
from reparax._remat import remat as remat
from reparax._saved import Saved as Saved
from reparax._saved import saved as saved
from reparax._scalar import Bounded as Bounded
from reparax._scalar import Elementwise as Elementwise
from reparax._scalar import Positive as Positive
from reparax._scalar import Scale as Scale
from reparax._simplex import Simplex as Simplex
from reparax._sphere import MaxNorm as MaxNorm
from reparax._sphere import PoincareBall as PoincareBall
from reparax._sphere import Sphere as Sphere
from reparax._standardization import WeightStandardization as WeightStandardization
from reparax._tie import Tie as Tie
from reparax._where import selected as selected

__version__ = "0.1.0"
