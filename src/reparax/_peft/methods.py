"""The PEFT methods by name, and the method for a chain of stages."""

from reparax._peft.ia3 import IA3Method
from reparax._peft.loha import LoHaMethod
from reparax._peft.lokr import LoKrMethod
from reparax._peft.lora import LoRAMethod
from reparax._peft.method import Method, Node, unscaled
from reparax._peft.oft import OFTMethod
from reparax.adapters import Delta, Gain, Hadamard, LoRA, Rotated
from reparax.matrices import Kronecker
from reparax.norms import WeightNorm

_ALL: tuple[Method, ...] = (LoRAMethod(), LoHaMethod(), LoKrMethod(), IA3Method(), OFTMethod())
METHODS = {method.name: method for method in _ALL}


def method_of(node: Node) -> Method:
    """The method of a parameter's outermost stage."""
    match node.stage:
        case LoRA():
            return METHODS["LORA"]
        case WeightNorm(detach=True):
            return METHODS["LORA"]
        case Gain():
            return METHODS["IA3"]
        case Rotated():
            return METHODS["OFT"]
        case Delta() if isinstance(unscaled(node)[0].stage, Kronecker):
            return METHODS["LOKR"]
        case Delta() if isinstance(unscaled(node)[0].stage, Hadamard):
            return METHODS["LOHA"]
        case stage:
            raise ValueError(f"PEFT has no equivalent of {stage!r}")
