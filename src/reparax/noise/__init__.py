"""Noise on weights, drawn again in every step from a key: Gaussian noise, dropout, and casts that round."""

from reparax.noise._cast import Cast as Cast
from reparax.noise._stages import VarNoise as VarNoise
from reparax.noise._stages import WeightDropout as WeightDropout
