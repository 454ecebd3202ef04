"""Equations that compute each entry from the same entries of the operands."""

from typing import Any

from reparax.programs.equations.view import View


class Pointwise(View):
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


class Add(Pointwise):
    """A sum of two arrays; derivatives have a primitive of their own for it."""

    names = ("add", "add_any")


class Subtract(Pointwise):
    """A difference of two arrays."""

    names = ("sub",)


class Multiply(Pointwise):
    """A product, entry by entry."""

    names = ("mul",)


class Divide(Pointwise):
    """A quotient, entry by entry."""

    names = ("div",)


class Negate(Pointwise):
    """The numbers with the other sign."""

    names = ("neg",)


class Arithmetic(Pointwise):
    """Another operation that takes about as long as a sum."""

    names = ("max", "min", "abs", "sign", "is_finite", "square", "integer_pow")


class Bitwise(Pointwise):
    """An operation on bits."""

    names = ("and", "or", "xor", "not", "shift_left", "shift_right_logical")


class Comparison(Pointwise):
    """A comparison of two arrays."""

    names = ("eq", "ne", "lt", "le", "gt", "ge")


class Select(Pointwise):
    """A ``jax.lax.select_n``: entries of the operands after the first, as this says."""

    names = ("select_n",)


class ConvertType(Pointwise):
    """A ``jax.lax.convert_element_type``."""

    names = ("convert_element_type",)

    @property
    def new_dtype(self) -> Any:
        """The dtype of the output."""
        return self.eqn.params["new_dtype"]


class Bitcast(Pointwise):
    """A ``jax.lax.bitcast_convert_type``."""

    names = ("bitcast_convert_type",)


class StopGradient(Pointwise):
    """A ``jax.lax.stop_gradient``."""

    names = ("stop_gradient",)


class ReducePrecision(Pointwise):
    """A ``jax.lax.reduce_precision``."""

    names = ("reduce_precision",)


class Copy(Pointwise):
    """A copy of an array."""

    names = ("copy",)
