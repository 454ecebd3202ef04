"""Values of which only the type is known: what a plan reads in the place of values that it does not compute."""

from typing import Any

from jax.extend.core import Primitive

from reparax.programs.jaxprs import type_of

_stand_in = Primitive("reparax_stand_in")
_stand_in.def_abstract_eval(lambda *, type: type)


def stand_in(v: Any) -> Any:
    """A value of the type of a variable, in a program that is traced and never run."""
    return _stand_in.bind(type=type_of(v))
