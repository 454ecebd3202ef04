"""State dicts of torch, and files of quantized weights, without torch itself."""

from reparax._torch.quantized import from_quantized as from_quantized
from reparax._torch.quantized import to_quantized as to_quantized
from reparax._torch.state_dict import from_torch as from_torch
from reparax._torch.state_dict import to_torch as to_torch
