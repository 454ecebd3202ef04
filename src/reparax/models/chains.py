"""The chain of a wrapped model, and its key."""

from typing import Any

from reparax.core.bound import lineage_of
from reparax.core.calls import call_name
from reparax.core.chain import Parametrization
from reparax.core.fields import Static
from reparax.core.paths import PyTree


def check_chain(who: str, model: Any, p: Any) -> Parametrization:
    """``p``, if it is a chain and ``model`` is none."""
    if isinstance(p, Parametrization) and not isinstance(model, Static):
        return p
    swapped = isinstance(model, Static)
    got = "a chain first" if swapped else f"{type(p).__name__} second"
    raise TypeError(f"{who} takes a model and then a chain, but got {got}. Write `{who}(model, rpx.WeightNorm())`.")


def check_model(who: str, model: Any, kind: type[Any], name: str) -> None:
    """Refuses what is not a model of the library; ``name`` is its class of models, as users write it."""
    if not isinstance(model, kind):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__} first"
        raise TypeError(f"{who} takes an instance of `{name}`, but got {got}. Write `{who}(Model(...), p)`.")


def needs_stream_error(p: Parametrization, what: str, give: str, mean: str) -> ValueError:
    """The error for a call of a chain that draws, without a stream to draw from."""
    return ValueError(
        f"{call_name(p, 'apply')} draws random numbers in each call of the model, so it needs a stream, but got "
        f"{what}. Give one, `{give}`, or evaluate with {mean}."
    )


def has_fixed(p: Parametrization) -> bool:
    """Whether the chain has values that do not train."""
    return any(value.fixed for stage in p for value in stage.raw_values.values())


def require_made_by(p: Parametrization, raw: PyTree) -> PyTree:
    """The raw tree, if ``p`` has made it."""
    lineage_of(p, raw)
    return raw


def needs_fixed_error(p: Parametrization, given: str, missing: str, write: str) -> ValueError:
    """The error for values that train, without those that do not."""
    return ValueError(
        f"{call_name(p, 'apply')} cannot read {given} alone: there is no {missing}, where values that do not train "
        f"are. {write}"
    )


def needs_start_error(p: Parametrization, give: str) -> ValueError:
    """The error for a chain whose start is random, without a key."""
    return ValueError(f"{call_name(p, 'init')} draws random numbers, so it needs a key. Write `{give}`.")
