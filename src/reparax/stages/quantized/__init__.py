"""Weights in fewer bits: quantized, rounded during training, or cast to another dtype.

A format is a row of a table: the numbers of its codes, and where scales and zeros lie. ``Quantized`` and
``FakeQuantized`` round with the same formula.
"""

from reparax.stages.quantized._quantized import Cast as Cast
from reparax.stages.quantized._quantized import FakeQuantized as FakeQuantized
from reparax.stages.quantized._quantized import Quantized as Quantized
