"""Files and state dicts of torch and PEFT, and files of quantized weights, without torch or PEFT themselves."""

from reparax.core.names import dir_of
from reparax.io.peft.read import from_peft as from_peft
from reparax.io.peft.write import to_peft as to_peft
from reparax.io.torch.quantized import from_quantized as from_quantized
from reparax.io.torch.quantized import to_quantized as to_quantized
from reparax.io.torch.state_dict import from_torch as from_torch
from reparax.io.torch.state_dict import to_torch as to_torch

__dir__ = dir_of("io")
