"""Reads and writes torch state dicts and PEFT adapters, without needing torch or PEFT.

Begin with ``_parameters.py``, because all readers and writers rely on the torch names and layouts that it finds for a
model's parameters. ``_torch_stages.py`` lists the stages that torch also has, ``_peft_adapters.py`` converts the
adapter of one array, and ``_peft_config.py`` interprets PEFT's settings. The package imports core, stages and numerics.
"""

from reparax.io._peft_read import from_peft as from_peft
from reparax.io._peft_write import to_peft as to_peft
from reparax.io._torch import from_torch as from_torch
from reparax.io._torch import to_torch as to_torch
