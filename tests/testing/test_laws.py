"""Every case against every law."""

import pytest
from cases import CASES, LEARNING

from reparax.testing import LAWS


def marks(name, law):
    # The laws share compiled programs, so the laws of one case belong to one worker.
    group = pytest.mark.xdist_group(name)
    return group if law.__name__ == "right_inverse" else (group, pytest.mark.thorough)


GRID = [
    pytest.param(law, *case, id=f"{name}-{law.__name__}", marks=marks(name, law))
    for name, case in {**CASES, **LEARNING}.items()
    for law in LAWS
]


@pytest.mark.parametrize(("law", "p", "params"), GRID)
def test_law(law, p, params, key):
    law(p, params(), key)
