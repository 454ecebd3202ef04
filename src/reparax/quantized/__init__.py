"""Weights as small numbers: stored as such, or rounded to them in training.

A format is a table of numbers and a scale for each block of the array; both stages round by the same formula.
"""

from reparax.quantized._quantize import Quantize as Quantize
from reparax.quantized._stored import Stored as Stored
