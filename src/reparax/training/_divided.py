"""Arrays of an optimizer's state that it divides by, which must not become 0 between two steps."""

from collections.abc import Callable
from typing import Any

import jax

from reparax._core.algebra import Parametrization
from reparax._core.calls import parts_of
from reparax._programs import jaxprs
from reparax._programs.divisors import divisors
from reparax._tree.paths import PyTree, flatten_with_names
from reparax.training._held import plain_path, stored_paths


def require_positive_kept(p: Parametrization, state: PyTree, update: Callable[[PyTree], Any]) -> None:
    """Requires that ``p`` rounds no positive number to 0 in an array that ``update(state)`` divides by."""
    losing = [stage for stage in parts_of(p) if not getattr(stage, "keeps_positive", False)]
    if not losing:
        return
    below = _divided_by(state, update)
    for stage in losing:
        if lost := sorted(stored_paths(stage, state) & below):
            raise ValueError(
                f"optimizer got state={stage!r} for {lost[0]!r}, by which the optimizer divides: in few bits small "
                f"numbers become 0 there, and steps become too long by orders of magnitude. Write "
                f"`state=rpx.Moments8bit()`, or select other arrays with `where`."
            )


def _divided_by(state: PyTree, update: Callable[[PyTree], Any]) -> set[str]:
    """The paths of the arrays by which an update divides."""
    paths, _, _ = flatten_with_names(state)
    program, consts = jaxprs.consts_first(jax.make_jaxpr(update)(state))
    return {plain_path(paths[i - len(consts)]) for i in divisors(program) if i >= len(consts)}
