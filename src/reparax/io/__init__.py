"""Files and state dicts of torch and PEFT, without torch or PEFT themselves.

Begin with ``_parameters.py``: torch's names and layouts of a model's parameters, on which all readers and writers rely.
A stage that torch has too is a row of ``_torch_stages.py``. What PEFT stores of an adapted array is in
``_peft_adapters.py``, and what its settings say in ``_peft_config.py``. Imports core, stages and numerics.
"""

from reparax.io._peft_read import from_peft as from_peft
from reparax.io._peft_write import to_peft as to_peft
from reparax.io._torch import from_torch as from_torch
from reparax.io._torch import to_torch as to_torch
