"""Every case against every law."""

import pytest
from cases import CASES, OF_OTHER_CASES

from reparax.testing import check_laws
from reparax.testing._laws import LAWS

# Their right inverse is that of stages which other cases have, or which files of their own compare with formulas.
OF_FILES = ("adapters", "definite", "differences", "linear spaces", "low rank", "masks", "orthogonal", "prunings")
OF_FILES += ("rotated", "singular values", "slices", "spectral norm", "standardization with a gain", "stored")
THOROUGH = {*OF_OTHER_CASES, *OF_FILES, "stored >> lora >> weight norm", "stored in other formats"}
assert CASES.keys() >= THOROUGH

# What may fail of a chain although each of its stages obeys: the other laws take stages one by one, or say something of
# each array that passes, or of the raw trees that chains of other cases have too.
OF_CHAINS = {"right_inverse", "keys", "update", "update_base", "transfer"}
# A stage here gets the zeros that another makes: each has finite gradients there, and the chain might not.
AT_ZEROS = {"low rank >> weight norm", "weight norm twice", "positive >> weight norm >> low rank", "low rank twice"}


def marks(name, law):
    # The laws share compiled programs, so the laws of one case belong to one worker.
    group = pytest.mark.xdist_group(name)
    quick = law == "right_inverse" and name not in THOROUGH
    return group if quick else (group, pytest.mark.thorough)


GRID = [
    pytest.param(law, *case, id=f"{name}-{law}", marks=marks(name, law))
    for name, case in CASES.items()
    for law in LAWS
    if name not in OF_OTHER_CASES or law in OF_CHAINS or (law == "gradients" and name in AT_ZEROS)
]


@pytest.mark.parametrize(("law", "p", "params"), GRID)
def test_law(law, p, params, key):
    check_laws(p, params(), key, laws=(law,))
