"""Constrained matrices: orthogonal, low-rank, positive definite, or with a pattern of equal or zero entries."""

from reparax.stages.matrices._orthogonal import Grassmann as Grassmann
from reparax.stages.matrices._orthogonal import Orthogonal as Orthogonal
from reparax.stages.matrices._orthogonal import SpecialOrthogonal as SpecialOrthogonal
from reparax.stages.matrices._orthogonal import Stiefel as Stiefel
from reparax.stages.matrices._patterns import BlockDiagonal as BlockDiagonal
from reparax.stages.matrices._patterns import Circulant as Circulant
from reparax.stages.matrices._patterns import Diagonal as Diagonal
from reparax.stages.matrices._patterns import Fibration as Fibration
from reparax.stages.matrices._patterns import PositiveDefinite as PositiveDefinite
from reparax.stages.matrices._patterns import PositiveSemidefinite as PositiveSemidefinite
from reparax.stages.matrices._patterns import Skew as Skew
from reparax.stages.matrices._patterns import Symmetric as Symmetric
from reparax.stages.matrices._patterns import Toeplitz as Toeplitz
from reparax.stages.matrices._patterns import Triangular as Triangular
from reparax.stages.matrices._spectrum import AlmostOrthogonal as AlmostOrthogonal
from reparax.stages.matrices._spectrum import FixedRank as FixedRank
from reparax.stages.matrices._spectrum import Invertible as Invertible
from reparax.stages.matrices._spectrum import Kronecker as Kronecker
from reparax.stages.matrices._spectrum import LowRank as LowRank
from reparax.stages.matrices._spectrum import SpecialLinear as SpecialLinear
