"""Noise on weights, drawn anew in every step from a key: Gaussian noise, dropout, and casts that round at random.

A draw depends on the key and on the path of the array. Noises in a row on one array wait until somebody reads the
array, so that ``apply`` can draw once for all of them.
"""

from reparax.noise._cast import Cast as Cast
from reparax.noise._estimate import noise_gradient as noise_gradient
from reparax.noise._gaussian import Gaussian as Gaussian
from reparax.noise._hard_concrete import HardConcrete as HardConcrete
from reparax.noise._stages import VarNoise as VarNoise
from reparax.noise._stages import WeightDropout as WeightDropout
from reparax.noise._variational_dropout import VariationalDropout as VariationalDropout
