"""Adapters store the model's own array as a fixed base, and train a small difference from the base.

In a chain, earlier stages that store or freeze weights act on the base, and all others act on the trained difference.
"""

from reparax.stages.adapters._adapters import Delta as Delta
from reparax.stages.adapters._adapters import Gain as Gain
from reparax.stages.adapters._adapters import Hadamard as Hadamard
from reparax.stages.adapters._adapters import LoRA as LoRA
from reparax.stages.adapters._adapters import Rotated as Rotated
from reparax.stages.adapters._adapters import TrainableSlices as TrainableSlices
from reparax.stages.adapters._adapters import VeRA as VeRA
