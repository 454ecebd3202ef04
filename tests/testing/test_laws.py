"""Every case against every law."""

import pytest
from cases import CASES, LEARNING

from reparax.testing import LAWS

# Their right inverse is that of stages which other cases have, or which files of their own compare with formulas.
THOROUGH = {
    "weight norm of rows",
    "spectral norm of rows",
    "noise >> spectral norm",
    "noise on factors",
    "weight norm >> low rank >> noise",
    "low rank twice",
    "singular values",
    "gptq and awq",
    "masks from data",
}
assert {**CASES, **LEARNING}.keys() >= THOROUGH


def marks(name, law):
    # The laws share compiled programs, so the laws of one case belong to one worker.
    group = pytest.mark.xdist_group(name)
    quick = law.__name__ == "right_inverse" and name not in THOROUGH
    return group if quick else (group, pytest.mark.thorough)


GRID = [
    pytest.param(law, *case, id=f"{name}-{law.__name__}", marks=marks(name, law))
    for name, case in {**CASES, **LEARNING}.items()
    for law in LAWS
]


@pytest.mark.parametrize(("law", "p", "params"), GRID)
def test_law(law, p, params, key):
    law(p, params(), key)
