"""Noise on weights, drawn from a key in each step: Gaussian noise, dropout, and weights with a distribution.

The noise of an array depends on the key and on the array's path. Where possible, consecutive noise stages on one array
are merged, so that ``apply`` draws random numbers only once.
"""

from reparax.stages.noise._distributions import Gaussian as Gaussian
from reparax.stages.noise._distributions import HardConcrete as HardConcrete
from reparax.stages.noise._distributions import VariationalDropout as VariationalDropout
from reparax.stages.noise._noise import VarNoise as VarNoise
from reparax.stages.noise._noise import WeightDropout as WeightDropout
