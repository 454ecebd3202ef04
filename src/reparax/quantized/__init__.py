"""Quantized weights: stored in few bits, or rounded during training.

A format is a set of numbers, with a scale for each block of the array. Both stages round with the same formula.
"""

from reparax.quantized._quantize import Quantize as Quantize
from reparax.quantized._stored import Stored as Stored
