"""Stages that separate, bound or fix the norm of weights, or standardize them."""

from reparax.stages.norms._norm import WeightNorm as WeightNorm
from reparax.stages.norms._spectral import SpectralNorm as SpectralNorm
from reparax.stages.norms._sphere import MaxNorm as MaxNorm
from reparax.stages.norms._sphere import PoincareBall as PoincareBall
from reparax.stages.norms._sphere import Sphere as Sphere
from reparax.stages.norms._standardization import WeightStandardization as WeightStandardization
