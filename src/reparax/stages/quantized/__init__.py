"""Quantized weights: stored in few bits, or rounded during training.

A format is a row of a table: the numbers of its codes, and where scales and zeros lie. ``Quantized`` and
``FakeQuantized`` round with the same formula.
"""

from reparax.stages.quantized._quantize import FakeQuantized as FakeQuantized
from reparax.stages.quantized._stored import Quantized as Quantized
