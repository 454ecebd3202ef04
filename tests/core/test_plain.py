"""Plain trees of arrays, and leaves that are none."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import reparax as rpx
from reparax.core.paths import has_symbols, is_traceable, types_of_result


def test_a_field_called_value_keeps_its_name() -> None:
    class Attention(NamedTuple):
        query: Array
        key: Array
        value: Array

    w = jnp.ones((2, 2))
    raw = rpx.WeightNorm(axis=-1, where="0/value").init([Attention(w, w, w)])
    assert jax.tree.map(jnp.shape, raw[0].value) == {"@weight_norm": {"g": (1, 2), "v": (2, 2)}}


def test_a_key_called_value_keeps_its_name(key: Array) -> None:
    effective = rpx.VarNoise(0.1, where="a/value").apply({"a": {"value": jnp.ones(3), "key": jnp.ones(3)}}, key)
    assert bool(jnp.all(effective["a"]["value"] != 1))
    np.testing.assert_array_equal(effective["a"]["key"], np.ones(3, np.float32))


def test_leaves_that_are_no_floating_arrays_pass_through_as_the_same_objects(key: Array) -> None:
    others = {
        "int": jnp.arange(6).reshape(2, 3),
        "bool": jnp.ones((2, 3), bool),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(7), 6).reshape(2, 3),
        "legacy": jnp.zeros((2, 2), jnp.uint32),
        "none": None,
        "float": 1.5,
        "count": 3,
        "flag": True,
        "text": "relu",
        "function": jnp.tanh,
        "object": object(),
    }
    chain = rpx.SpectralNorm() >> rpx.WeightDropout(0.1) >> rpx.quantized.Cast("bfloat16") >> rpx.VarNoise(0.1)
    raw = chain.init({"w": jnp.eye(4), **others})
    for tree in [raw, chain.update(raw), chain.apply(raw, key), chain.fold(raw)]:
        assert all(tree[name] is others[name] for name in others)


class Numbered:
    """A container that JAX opens, and that gives its children no names."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> Any:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Any:
        return cls(*children)


class NumberedToo(Numbered):
    """The same, registered by functions."""


jax.tree_util.register_pytree_node_class(Numbered)
jax.tree_util.register_pytree_node(NumberedToo, lambda x: (x.children, None), lambda _, xs: NumberedToo(*xs))
ONES, BIAS = np.ones((3, 2), np.float32), np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        (Numbered(ONES, {"b": BIAS}), ["0", "1/b"]),
        ({"a": NumberedToo(ONES, ONES), "c": [Numbered(ONES)]}, ["a/0", "a/1", "c/0/0"]),
        (NumberedToo(Numbered(ONES), None), ["0/0"]),
    ],
)
def test_children_without_names_are_numbered(tree: Any, paths: list[str]) -> None:
    p = rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.1)
    raw = p.init(tree)
    assert list(p.raw_paths(tree)) == paths
    jax.tree.map(np.testing.assert_array_equal, rpx.combine(*rpx.partition(raw)), raw)
    for effective in (p.fold(raw), p.fold(p.update(raw)), p.fold(rpx.transfer(p, p, raw)), jax.jit(p.fold)(raw)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), effective, tree)
    p.check(raw, like=tree)
    assert jax.tree.structure(p.apply(raw, jax.random.key(0))) == jax.tree.structure(tree)
    twice = p.fold(p.set(raw, paths[0], 2 * ONES))
    assert [float(np.max(x)) for x in jax.tree.leaves(twice)] == [2, *[1] * (len(paths) - 1)]
    norms = [x for path, x in jax.tree.leaves_with_path(raw) if "'g'" in str(path)]
    np.testing.assert_allclose(norms, np.full((len(norms), 1, 2), 3**0.5), rtol=1e-6)


@jax.tree_util.register_pytree_node_class
class Counted(dict[str, Any]):
    """A mapping without names that keeps more than its items, in the order in which they came."""

    def __init__(self, items: Any, step: int) -> None:
        super().__init__(items)
        self.step = step

    def tree_flatten(self) -> Any:
        return list(self.values()), (tuple(self), self.step)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Any:
        return cls(zip(aux[0], children, strict=True), aux[1])


def test_a_mapping_keeps_what_it_holds_beside_its_items() -> None:
    p, tree = rpx.Freeze(), Counted({"w": ONES, "b": BIAS}, step=7)
    raw = p.init(tree)
    assert p.raw_paths(tree) == {"w": "w", "b": "b"}
    assert (raw.step, p.fold(raw).step, list(raw)) == (7, 7, ["w", "b"])
    np.testing.assert_array_equal(raw["b"]["@freeze"]["@fixed"]["w"], BIAS)


class Ordered(dict[str, Any]):
    """A mapping without names that keeps the order of its items, and an array beside them."""

    extra: Any = None


def _ordered(keys: Any, children: Any) -> Ordered:
    tree = Ordered(zip(keys, children[1:], strict=True))
    tree.extra = children[0]
    return tree


jax.tree_util.register_pytree_node(Ordered, lambda tree: ([tree.extra, *tree.values()], tuple(tree)), _ordered)


def test_a_mapping_without_names_keeps_its_order_and_what_is_beside_its_items() -> None:
    tree = Ordered(z=np.ones((2, 3), np.float32), a=np.ones((3, 2), np.float32))
    tree.extra = np.full((2, 2), 3, np.float32)
    p = rpx.Freeze() >> rpx.VarNoise(0.0)
    found = p.apply(p.init(tree), jax.random.key(0))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    np.testing.assert_array_equal(found.extra, tree.extra)


class Sorted(dict[str, Any]):
    """A mapping without names, made from a dict, whose children JAX has in the order of their names."""


jax.tree_util.register_pytree_node(
    Sorted,
    lambda tree: ([tree[name] for name in sorted(tree)], tuple(sorted(tree))),
    lambda names, xs: Sorted(zip(names, xs, strict=True)),
)


def test_a_mapping_that_is_made_from_a_dict_gives_names_and_comes_back() -> None:
    p, tree = rpx.WeightNorm(axis=-1), Sorted(z=Sorted(kernel=ONES), a=BIAS)
    raw = p.init(tree)
    assert p.raw_paths(tree) == {"a": "a", "z/kernel": "z/kernel"}
    assert (type(raw), type(raw["z"]), type(p.fold(raw)["z"])) == (Sorted, Sorted, Sorted)
    np.testing.assert_allclose(p.fold(raw)["z"]["kernel"], ONES, rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "traceable"),
    [
        (np.ones(2, np.int8), True),
        (np.float32(1), True),
        (np.ones(2, bool), True),
        (np.array(["a"]), False),
        (np.array([None]), False),
        (jnp.zeros(2), True),
        (jax.random.key(0), True),
        (jax.ShapeDtypeStruct((2,), jnp.float32), True),
        (1.0, False),
        ("a", False),
        (None, False),
    ],
)
def test_what_a_program_takes(x: Any, traceable: Any) -> None:
    assert is_traceable(x) == traceable


def test_types_of_a_result_leave_out_what_is_no_array() -> None:
    found = types_of_result(lambda tree: {**tree, "sum": jnp.sum(tree["w"])}, {"w": np.ones(2), "f": abs, "n": 3})
    assert found == {
        "w": jax.ShapeDtypeStruct((2,), jnp.float32),
        "sum": jax.ShapeDtypeStruct((), jnp.float32),
        "f": None,
        "n": None,
    }
    (n,) = jax.export.symbolic_shape("n")
    assert has_symbols([np.ones(2), jax.ShapeDtypeStruct((2, n), jnp.float32)])
    assert not has_symbols([np.ones(2), np.ones((2, 3))])
