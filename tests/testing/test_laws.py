"""Every case against every law."""

import pytest
from cases import CASES

from reparax.testing import LAWS

# The laws share compiled programs, so the laws of one case belong to one worker.
GRID = [
    pytest.param(law, *case, id=f"{name}-{law.__name__}", marks=pytest.mark.xdist_group(name))
    for name, case in CASES.items()
    for law in LAWS
]


@pytest.mark.parametrize(("law", "p", "params"), GRID)
def test_law(law, p, params, key):
    law(p, params(), key)
