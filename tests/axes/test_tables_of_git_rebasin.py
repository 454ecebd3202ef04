"""The groups of git-re-basin's networks are those of its specifications, which its authors wrote by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from axes.networks import KEY
from grids import mostly_thorough

from reparax.axes import axis_groups


def dense(name, p_in, p_out):
    return {f"{name}/kernel": (p_in, p_out), f"{name}/bias": (p_out,)}


def conv(name, p_in, p_out):
    return {f"{name}/kernel": (None, None, p_in, p_out)}


def norm(name, p):
    return {f"{name}/scale": (p,), f"{name}/bias": (p,)}


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.relu(nn.Dense(12)(x))
        return nn.log_softmax(nn.Dense(10)(x))


def mlp():
    """``mlp_permutation_spec(3)``."""
    inner = {k: v for i in (1, 2) for k, v in dense(f"Dense_{i}", f"P_{i - 1}", f"P_{i}").items()}
    return dense("Dense_0", None, "P_0") | inner | dense("Dense_3", "P_2", None)


WIDTHS = (4, 4, "pool", 8, 8, "pool", 16, 16, 16, "pool", 32, 32, 32, "pool", 32, 32, 32, "pool")


class VGG(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in WIDTHS:
            if width == "pool":
                x = nn.max_pool(x, (2, 2), (2, 2))
            else:
                x = nn.relu(nn.LayerNorm()(nn.Conv(width, (3, 3))(x)))
        x = x.reshape(len(x), -1)
        for width in (32, 32):
            x = nn.relu(nn.Dense(width)(x))
        return nn.log_softmax(nn.Dense(10)(x))


def vgg():
    """``vgg16_permutation_spec()``: a permutation for each layer, that of the last one behind the flattening."""
    table = {}
    for i in range(13):
        table |= conv(f"Conv_{i}", f"P_Conv_{i - 1}" if i else None, f"P_Conv_{i}")
        table |= {f"Conv_{i}/bias": (f"P_Conv_{i}",)} | norm(f"LayerNorm_{i}", f"P_Conv_{i}")
    ends = dense("Dense_0", "P_Conv_12", "P_Dense_0") | dense("Dense_1", "P_Dense_0", "P_Dense_1")
    return table | ends | dense("Dense_2", "P_Dense_1", None)


class Block(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x):
        def conv(name, x, size, stride):
            return nn.Conv(self.width, (size, size), stride, use_bias=False, name=name)(x)

        y = nn.relu(nn.LayerNorm(name="norm1")(conv("conv1", x, 3, self.stride)))
        y = nn.LayerNorm(name="norm2")(conv("conv2", y, 3, 1))
        if self.stride > 1:
            x = nn.LayerNorm(name="shortcut_norm")(conv("shortcut", x, 1, self.stride))
        return nn.relu(x + y)


class ResNet20(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.LayerNorm(name="norm1")(nn.Conv(4, (3, 3), use_bias=False, name="conv1")(x)))
        for group, width in enumerate((4, 8, 16)):
            for i in range(3):
                x = Block(width, 2 if group and not i else 1, name=f"group{group}_block{i}")(x)
        return nn.log_softmax(nn.Dense(10, name="dense")(x.mean((1, 2))))


def resnet20():
    """``resnet20_permutation_spec()``: one permutation for all blocks of a group, and one inside of each block."""

    def block(name, p_in, p_out):
        inner = f"P_{name}_inner"
        table = conv(f"{name}/conv1", p_in, inner) | norm(f"{name}/norm1", inner)
        table |= conv(f"{name}/conv2", inner, p_out) | norm(f"{name}/norm2", p_out)
        short = conv(f"{name}/shortcut", p_in, p_out) | norm(f"{name}/shortcut_norm", p_out)
        return table | (short if p_in != p_out else {})

    table = conv("conv1", None, "P_bg0") | norm("norm1", "P_bg0") | dense("dense", "P_bg2", None)
    for group in range(3):
        for i in range(3):
            before = f"P_bg{group - 1}" if group and not i else f"P_bg{group}"
            table |= block(f"group{group}_block{i}", before, f"P_bg{group}")
    return table


TABLES = {
    "mlp": (MLP(), (1, 28), mlp),
    "vgg": (VGG(), (1, 32, 32, 3), vgg),
    "resnet20": (ResNet20(), (1, 32, 32, 3), resnet20),
}


@pytest.mark.parametrize("name", mostly_thorough(TABLES, "mlp", "resnet20"))
def test_groups_are_those_of_the_specification(name):
    module, shape, table = TABLES[name]
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    params = jax.eval_shape(module.init, KEY, x)["params"]
    groups = axis_groups(lambda params, x: module.apply({"params": params}, x), params, x)
    want = dict[str, set]()
    for path, permutations in table().items():
        for axis, p in enumerate(permutations):
            if p is not None:
                want.setdefault(p, set()).add((path, axis))
    found = [{tuple(member) for member in group.members} for group in groups]
    assert sorted(map(sorted, found)) == sorted(map(sorted, want.values()))
