"""Stages that separate, bound or fix the norm of weights, or standardize them."""

from reparax.norms._norm import WeightNorm as WeightNorm
from reparax.norms._spectral import SpectralNorm as SpectralNorm
from reparax.norms._sphere import MaxNorm as MaxNorm
from reparax.norms._sphere import PoincareBall as PoincareBall
from reparax.norms._sphere import Sphere as Sphere
from reparax.norms._standardization import WeightStandardization as WeightStandardization
