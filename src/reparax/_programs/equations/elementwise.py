"""Equations that compute each entry from the same entries of the operands."""

from typing import Any

from reparax._programs.equations.view import View


class Elementwise(View):
    """An equation that computes each entry from the same entries; this one takes longer than a sum, or is rare."""

    names = (
        *("rem", "pow", "shift_right_arithmetic", "clamp", "nextafter", "real", "imag", "complex", "conj"),
        *(
            "exp",
            "exp2",
            "expm1",
            "log",
            "log1p",
            "sqrt",
            "rsqrt",
            "cbrt",
            "tanh",
            "logistic",
            "erf",
            "erfc",
            "erf_inv",
        ),
        *("sin", "cos", "tan", "floor", "ceil", "round"),
    )


class Add(Elementwise):
    """A sum of two arrays; derivatives have a primitive of their own for it."""

    names = ("add", "add_any")


class Subtract(Elementwise):
    """A difference of two arrays."""

    names = ("sub",)


class Multiply(Elementwise):
    """A product, entry by entry."""

    names = ("mul",)


class Divide(Elementwise):
    """A quotient, entry by entry."""

    names = ("div",)


class Negate(Elementwise):
    """The numbers with the other sign."""

    names = ("neg",)


class Arithmetic(Elementwise):
    """Another operation that takes about as long as a sum."""

    names = ("max", "min", "abs", "sign", "square", "integer_pow", "is_finite")


class Bitwise(Elementwise):
    """An operation on bits."""

    names = ("and", "or", "xor", "not", "shift_left", "shift_right_logical")


class Comparison(Elementwise):
    """A comparison of two arrays."""

    names = ("eq", "ne", "lt", "le", "gt", "ge")


class Select(Elementwise):
    """A ``jax.lax.select_n``: entries of the operands after the first, as this says."""

    names = ("select_n",)


class Cast(Elementwise):
    """A ``jax.lax.convert_element_type``."""

    names = ("convert_element_type",)

    @property
    def new_dtype(self) -> Any:
        """The dtype of the output."""
        return self.eqn.params["new_dtype"]


class Bitcast(Elementwise):
    """A ``jax.lax.bitcast_convert_type``."""

    names = ("bitcast_convert_type",)


class StopGradient(Elementwise):
    """A ``jax.lax.stop_gradient``."""

    names = ("stop_gradient",)


class ReducePrecision(Elementwise):
    """A ``jax.lax.reduce_precision``."""

    names = ("reduce_precision",)


class Copy(Elementwise):
    """A copy of an array."""

    names = ("copy",)
