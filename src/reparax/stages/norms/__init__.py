"""Stages that bound or fix the norm of weights, train it separately, or standardize the weights."""

from reparax.stages.norms._norms import MaxNorm as MaxNorm
from reparax.stages.norms._norms import PoincareBall as PoincareBall
from reparax.stages.norms._norms import Sphere as Sphere
from reparax.stages.norms._norms import WeightNorm as WeightNorm
from reparax.stages.norms._norms import WeightStandardization as WeightStandardization
from reparax.stages.norms._spectral import SpectralNorm as SpectralNorm
