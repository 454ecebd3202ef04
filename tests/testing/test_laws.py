"""Every case against every law."""

import pytest
from cases import CASES, OF_EACH_CLASS

from reparax.testing import check_laws
from reparax.testing._laws import LAWS

# Their right inverse is that of stages which other cases have, or which files of their own compare with formulas.
OF_FILES = ("adapters", "definite", "differences", "linear spaces", "low rank", "masks", "orthogonal", "prunings")
OF_FILES += ("rotated", "singular values", "slices", "spectra and patterns", "spectral norm")
OF_FILES += ("standardization with a gain", "stored")
THOROUGH = CASES.keys() - OF_EACH_CLASS | {*OF_FILES, "stored >> lora >> weight norm"}
assert CASES.keys() >= THOROUGH

# What may fail of a chain although each of its stages obeys, and of a stage that is told other numbers. The other laws
# say something of each array that passes, or of a class, so the cases of OF_EACH_CLASS keep them.
OF_CHAINS = {"right_inverse", "keys", "update", "update_base", "transfer"}
# Stages with formulas of their own in a class; and chains in which one stage makes zeros for the next, where each has
# finite gradients and the chain might not.
MORE = {
    "weight norm of other axes": {"types", "gradients"},
    "dropout of rows and of blocks": {"types", "mean"},
    "noise of two kinds": {"half_precision", "mean", "gradients"},
    "stacked": {"half_precision", "mean", "gradients"},
    "stored": {"types", "checkpoints"},
    "stored in other formats": {"half_precision", "gradients"},
    "low rank >> weight norm": {"gradients"},
    "weight norm twice": {"gradients"},
    "positive >> weight norm >> low rank": {"gradients"},
}
assert CASES.keys() >= MORE.keys()


def marks(name, law):
    # The laws share compiled programs, so the laws of one case belong to one worker.
    group = pytest.mark.xdist_group(name)
    quick = law == "right_inverse" and name not in THOROUGH
    return group if quick else (group, pytest.mark.thorough)


GRID = [
    pytest.param(law, *case, id=f"{name}-{law}", marks=marks(name, law))
    for name, case in CASES.items()
    for law in LAWS
    if name in OF_EACH_CLASS or law in OF_CHAINS | MORE.get(name, set())
]


@pytest.mark.parametrize(("law", "p", "params"), GRID)
def test_law(law, p, params, key):
    check_laws(p, params(), key, laws=(law,))
