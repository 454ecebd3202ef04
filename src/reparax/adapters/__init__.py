"""Adapters: the model's own array is a fixed base, and a small difference to it trains.

Earlier stages in the chain that store or freeze numbers act on the base; all others act on the difference.
"""

from reparax.adapters._cayley_neumann import CayleyNeumann as CayleyNeumann
from reparax.adapters._delta import Delta as Delta
from reparax.adapters._gain import Gain as Gain
from reparax.adapters._hadamard import Hadamard as Hadamard
from reparax.adapters._lora import LoRA as LoRA
from reparax.adapters._rotated import Rotated as Rotated
from reparax.adapters._slices import Slices as Slices
from reparax.adapters._vera import VeRA as VeRA
