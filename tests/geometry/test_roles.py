import re

import jax
import pytest
from geometry.networks import NETWORKS
from grids import mostly_thorough

from reparax._tree.paths import named, path_text
from reparax.geometry import Role, roles


def axes(role):
    return role.inputs, role.outputs, role.stacked


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", mostly_thorough(NETWORKS, "gemma", "attention", "equinox_attention", "haiku_resnet"))
def test_each_axis_of_each_weight_has_its_role(name):
    fun, params, args, table = NETWORKS[name]()
    types = jax.eval_shape(lambda *args: args, params, *args)
    paths, found, _ = named(roles(fun)(*types), lambda x: isinstance(x, Role))
    for path, role in zip(map(path_text, paths), found, strict=True):
        want = [axes for pattern, axes in table.items() if re.fullmatch(pattern, path)]
        assert axes(role) == (want[0] if want else ((), (), ())), (path, role)
        assert bool(role.why) == (not want)
