"""Adapters in the format of PEFT, without PEFT itself."""

from reparax._peft.read import from_peft as from_peft
from reparax._peft.write import to_peft as to_peft
