"""Operators between stages other than ``>>``, and ``>>`` with what is no stage: errors that show what to write."""

from typing import Any

from reparax.core.chains.calls import describe_non_stage
from reparax.core.chains.value import Static

OTHERS = {"rshift": ">>", "lshift": "<<", "add": "+", "or": "|", "matmul": "@", "mul": "*"}


def refuse_other_operators(cls: type) -> None:
    """Lets ``a + b`` and the like say what to write; a type checker, which sees no such method, says so before."""
    for name, symbol in OTHERS.items():
        for prefix in ("r",) if name == "rshift" else ("", "r"):
            setattr(cls, f"__{prefix}{name}__", _make_refusal(symbol, is_reflected=prefix == "r"))


def _make_refusal(symbol: str, *, is_reflected: bool) -> Any:
    """The method of an operator between stages, which raises :func:`other_than_stages_error`."""

    def refuse(self: object, other: object) -> None:
        pair = (other, self) if is_reflected else (self, other)
        raise other_than_stages_error(pair[0], symbol, pair[1])

    return refuse


def other_than_stages_error(lhs: Any, symbol: str, rhs: Any) -> TypeError:
    """The error for ``first >> second``, or another operator, where they are not two stages joined by ``>>``."""
    text = f"{_as_code(lhs)} {symbol} {_as_code(rhs)}"
    if non_stages := [x for x in (lhs, rhs) if not isinstance(x, Static)]:
        return TypeError(f"{text}: expected a stage, but got {describe_non_stage(non_stages[0])}")
    return TypeError(
        f"{text}: stages are joined by `>>`, first the one that acts on the raw values. Write "
        f"`{_as_code(lhs)} >> {_as_code(rhs)}`."
    )


def _as_code(x: Any) -> str:
    """A stage as code; of anything else the name, or the type."""
    if x is None or isinstance(x, Static | bool | int | float | str):
        return repr(x)
    return str(getattr(x, "__name__", type(x).__name__))
