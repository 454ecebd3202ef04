"""Weights in fewer bits: quantized, rounded during training, or cast to another dtype.

A number format lists the numbers that the stored codes stand for, and says how scales and zeros are stored.
``Quantized`` and ``FakeQuantized`` round with the same formula.
"""

from reparax.stages.quantized._quantized import Cast as Cast
from reparax.stages.quantized._quantized import FakeQuantized as FakeQuantized
from reparax.stages.quantized._quantized import Quantized as Quantized
