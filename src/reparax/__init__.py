"""Functional parametrization for JAX: parameters as the optimizer moves them, and as the model reads them."""

from reparax._cast import Cast as Cast
from reparax._constraint import Constraint as Constraint
from reparax._core import Chain as Chain
from reparax._core import Parametrization as Parametrization
from reparax._core import from_json as from_json
from reparax._definite import PositiveDefinite as PositiveDefinite
from reparax._definite import PositiveSemidefinite as PositiveSemidefinite
from reparax._fibration import Fibration as Fibration
from reparax._freeze import Freeze as Freeze
from reparax._hurwitz import Hurwitz as Hurwitz
from reparax._leafwise import Perturbation as Perturbation
from reparax._leafwise import Reparametrization as Reparametrization
from reparax._linear import BlockDiagonal as BlockDiagonal
from reparax._linear import Circulant as Circulant
from reparax._linear import Diagonal as Diagonal
from reparax._linear import Skew as Skew
from reparax._linear import Symmetric as Symmetric
from reparax._linear import Toeplitz as Toeplitz
from reparax._linear import Triangular as Triangular
from reparax._matrix import Kronecker as Kronecker
from reparax._matrix import LowRank as LowRank
from reparax._noise import VarNoise as VarNoise
from reparax._noise import WeightDropout as WeightDropout
from reparax._norm import SpectralNorm as SpectralNorm
from reparax._norm import WeightNorm as WeightNorm
from reparax._orthogonal import Grassmann as Grassmann
from reparax._orthogonal import Orthogonal as Orthogonal
from reparax._orthogonal import SpecialOrthogonal as SpecialOrthogonal
from reparax._orthogonal import Stiefel as Stiefel
from reparax._raw import combine as combine
from reparax._raw import labels as labels
from reparax._raw import partition as partition
from reparax._scalar import Positive as Positive
from reparax._singular import AlmostOrthogonal as AlmostOrthogonal
from reparax._singular import FixedRank as FixedRank
from reparax._singular import Invertible as Invertible
from reparax._singular import SpecialLinear as SpecialLinear
from reparax._tie import Tie as Tie
from reparax._where import selected as selected

__version__ = "0.1.0"
