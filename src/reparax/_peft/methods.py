"""The PEFT methods by name, and the method for a chain of stages."""

from reparax._peft.beft import BEFTMethod
from reparax._peft.ia3 import IA3Method
from reparax._peft.loha import LoHaMethod
from reparax._peft.lokr import LoKrMethod
from reparax._peft.lora import LoRAMethod
from reparax._peft.method import Method, StageNode, Whole, split_scale
from reparax._peft.oft import OFTMethod
from reparax._peft.rows import ROWS
from reparax.adapters import Delta, Gain, Hadamard, LoRA, Rotated
from reparax.matrices import Kronecker
from reparax.norms import WeightNorm
from reparax.numbers import Scale

_ALL: tuple[Method, ...] = (
    *(LoRAMethod(), LoHaMethod(), LoKrMethod(), IA3Method(), OFTMethod(), BEFTMethod(), Whole()),
    *ROWS,
)
METHODS = {method.name: method for method in _ALL}


def is_of_bias(node: StageNode) -> bool:
    """Whether a node is a scaled difference of one axis."""
    value = node.values["x"]
    x = value.values["x"] if isinstance(value, StageNode) and isinstance(value.stage, Scale) else None
    return not isinstance(x, StageNode) and getattr(x, "ndim", None) == 1


def method_of(node: StageNode) -> Method:
    """The method whose chain made a parameter."""
    if method_of_rows := next((method for method in ROWS if method.matches(node)), None):
        return method_of_rows
    match node.stage:
        case LoRA() | WeightNorm(detach=True):
            return METHODS["LORA"]
        case Gain():
            return METHODS["IA3"]
        case Rotated():
            return METHODS["OFT"]
        case Delta(relative=False) if is_of_bias(node):
            return METHODS["LORA"]
        case Delta(relative=False) if getattr(node.values["x"], "ndim", None) == 1:
            return METHODS["BEFT"]
        case Delta(relative=False) if isinstance(split_scale(node)[0].stage, Kronecker):
            return METHODS["LOKR"]
        case Delta(relative=False) if isinstance(split_scale(node)[0].stage, Hadamard):
            return METHODS["LOHA"]
        case stage:
            raise ValueError(f"PEFT has no equivalent of {stage!r}")
