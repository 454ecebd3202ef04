"""The kind of an equation."""

from jax.extend.core import JaxprEqn

from reparax.programs.equations import bodies, contractions, elementwise, moves, reductions
from reparax.programs.equations.view import View

KINDS: dict[str, type[View]] = {
    name: kind
    for module in (contractions, reductions, moves, elementwise, bodies)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, View)
    for name in kind.names
}


def kind_of(eqn: JaxprEqn) -> type[View]:
    """The class of the view of an equation; ``View`` itself if it has no other."""
    kind = KINDS.get(eqn.primitive.name, View)
    # Numbers seen as bytes have one more axis, so entries are not computed from the same entries.
    view = kind(eqn)
    return View if kind is elementwise.Bitcast and view.operands[0].aval.shape != view.type.shape else kind


def view_of(eqn: JaxprEqn) -> View:
    """The view of an equation."""
    return kind_of(eqn)(eqn)
