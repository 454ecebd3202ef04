"""Equations that compute each entry from the same entries of the operands."""

from typing import Any

from reparax._programs.equations.view import View


class Add(View):
    """A sum of two arrays; derivatives have a primitive of their own for it."""

    names = ("add", "add_any")


class Subtract(View):
    """A difference of two arrays."""

    names = ("sub",)


class Multiply(View):
    """A product, entry by entry."""

    names = ("mul",)


class Divide(View):
    """A quotient, entry by entry."""

    names = ("div",)


class Negate(View):
    """The numbers with the other sign."""

    names = ("neg",)


class Arithmetic(View):
    """Another operation that takes about as long as a sum."""

    names = ("max", "min", "abs", "sign", "square", "integer_pow", "is_finite")


class Bitwise(View):
    """An operation on bits."""

    names = ("and", "or", "xor", "not", "shift_left", "shift_right_logical")


class Comparison(View):
    """A comparison of two arrays."""

    names = ("eq", "ne", "lt", "le", "gt", "ge")


class Select(View):
    """A ``jax.lax.select_n``: entries of the operands after the first, as this says."""

    names = ("select_n",)


class Cast(View):
    """A ``jax.lax.convert_element_type``."""

    names = ("convert_element_type",)

    @property
    def new_dtype(self) -> Any:
        """The dtype of the output."""
        return self.eqn.params["new_dtype"]


class Bitcast(View):
    """A ``jax.lax.bitcast_convert_type``."""

    names = ("bitcast_convert_type",)


class StopGradient(View):
    """A ``jax.lax.stop_gradient``."""

    names = ("stop_gradient",)
