"""What all wrappers share, and the rules of each, one by one: names, keys, collections, attributes."""

import importlib
import inspect
import pickle
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import reparax as rpx
from reparax.models import base
from reparax.models import equinox as of_equinox
from reparax.models import haiku as of_haiku
from reparax.models import linen as of_linen
from reparax.models import nnx as of_nnx

W = np.ones((3, 2), np.float32)
X = np.ones((4, 3), np.float32)


def shapes(make: Any) -> Any:
    """A model of shapes."""
    return eqx.filter_eval_shape(make, jax.random.key(0))


# ---- arguments

MODELS = {
    "nnx": (rpx.nnx.Parametrized, nnx.eval_shape(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)))),
    "linen": (rpx.linen.parametrized, nn.Dense(2)),
    "equinox": (rpx.equinox.Parametrized, shapes(lambda key: eqx.nn.Linear(3, 2, key=key))),
    "haiku": (rpx.haiku.parametrized, hk.transform(lambda x: hk.Linear(2)(x))),
}


@pytest.mark.parametrize("library", MODELS)
def test_a_model_comes_first_and_then_a_chain(library: str) -> None:
    wrap, model = MODELS[library]
    with pytest.raises(TypeError, match=r"takes a model and then a chain, but got .* second"):
        wrap(model, None)
    with pytest.raises(TypeError, match=r"takes a model and then a chain, but got a chain first"):
        wrap(rpx.WeightNorm(), rpx.WeightNorm())


class Own:
    """A class with a member of each kind."""

    field = 1

    def method(self) -> None: ...

    @property
    def read(self) -> int:
        return 1

    @staticmethod
    def static() -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    def __private(self) -> None: ...


def test_a_method_of_the_wrapper_hides_a_method_of_any_kind_but_no_field() -> None:
    found = {name: base._is_method(Own, name) for name in ("method", "read", "static", "of_class", "field", "absent")}
    assert found == dict.fromkeys(("method", "read", "static", "of_class"), True) | {"field": False, "absent": False}
    for name in ("method", "read", "static", "of_class"):
        wrapper = type(
            "Wrapper", (), {name: lambda self: None, "_hidden": lambda self: None, "other": lambda self: None}
        )
        with pytest.raises(ValueError, match=f"^me has '{name}' of its own, which would hide '{name}' of Own"):
            base.require_reachable("me", Own(), wrapper, ["other"])
        base.require_reachable("me", Own(), wrapper, [name])
    base.require_reachable("me", Own(), type("Wrapper", (), {"field": lambda self: None, "method": 1}), [])


@pytest.mark.parametrize(
    ("p", "key", "want"),
    [(rpx.WeightNorm(), None, None), (rpx.WeightNorm(), 3, None), (rpx.LoRA(1), 3, 3), (rpx.LoRA(1), None, "refused")],
)
def test_a_key_for_the_start_is_that_of_chains_that_draw(p: Any, key: Any, want: Any) -> None:
    with (
        pytest.raises(ValueError, match="draws random numbers, so it needs a key")
        if want == "refused"
        else nullcontext()
    ):
        assert base.start_key(p, key, "f(key)") == want


class Base:
    """A model that a wrapper reads."""

    def __init__(self) -> None:
        self.width, self.none = 4, None

    kind, nothing = "kind", None

    def hidden(self, *args: Any) -> Any:
        return args

    @property
    def double(self) -> int:
        return 2 * self.width

    @staticmethod
    def constant() -> int:
        return 1

    @classmethod
    def named(cls) -> str:
        return cls.__name__


def read(name: str, raw: Any) -> Any:
    """An attribute, and how it was read."""
    found = base.find_attribute(
        "owner",
        raw,
        name,
        lambda name: ("instance", name),
        lambda name: ("effective", name),
        lambda *args: ("call", *args),
    )
    return found() if name in ("constant", "named") else found(1, 2) if name == "hidden" else found


def test_an_attribute_is_that_of_the_instance_of_the_class_or_of_the_effective_model() -> None:
    raw: Any = Base()
    assert [read(name, raw) for name in ("width", "none", "double", "kind", "constant", "named", "hidden")] == [
        ("instance", "width"),
        ("instance", "none"),
        ("effective", "double"),
        "kind",
        1,
        "Base",
        ("call", "hidden", 1, 2),
    ]
    raw.hidden = 3
    assert base.find_attribute("", raw, "hidden", lambda _: "instance", str, print) == "instance"
    for name, model in (("absent", raw), ("_width", raw), ("__len__", raw), ("width", None)):
        with pytest.raises(AttributeError, match=f"'str' object has no attribute '{name}'"):
            read(name, model)


# ---- variables of functional libraries


class Chain:
    """A chain that records how it was called."""

    random_init, stochastic = True, True

    def init(self, *args: Any) -> Any:
        return "init", *args

    def apply(self, *args: Any) -> Any:
        return "apply", *args

    def update(self, *args: Any) -> Any:
        return "update", *args


class Two(base.Functions):
    """Functions of two variables."""

    _count, p = 2, Chain()

    def _get(self, *variables: Any) -> Any:
        return variables

    def _set(self, raw: Any, *variables: Any) -> Any:
        return raw, *variables

    def _set_plain(self, params: Any, *variables: Any) -> Any:
        return "plain", params, *variables


class One(Two):
    _count = 1


@pytest.mark.parametrize(("functions", "given"), [(One(), ("v",)), (Two(), ("v", "w"))], ids=["one", "two"])
def test_variables_come_first_and_then_a_key(functions: Any, given: Any) -> None:
    for more, named, key in (
        ((), {}, None),
        (("k",), {}, "k"),
        ((), {"key": "k"}, "k"),
        (("k",), {"key": "other"}, "k"),
    ):
        if key:
            assert functions.start(*given, *more, **named) == (("init", given, "k"), *given)
        assert functions.update(*given, *more, **named, grads="g") == (("update", given, key, "g"), *given)
    assert functions.update(*given) == (("update", given, None, None), *given)
    assert functions.raw(*given) == given


def test_what_has_fixed_values_keeps_the_error_of_the_chain() -> None:
    module = rpx.linen.parametrized(nn.Dense(2), rpx.Freeze())
    with pytest.raises(ValueError, match="never went through init"):
        module.effective({"params": {"kernel": W}, "fixed": {}})
    network = rpx.haiku.parametrized(hk.transform_with_state(lambda x: hk.Linear(2)(x)), rpx.Freeze())
    with pytest.raises(ValueError, match="never went through init"):
        network.effective({"l": {"w": W}}, {"~fixed": {}})


def test_a_raw_tree_is_split_without_empty_branches_and_joined() -> None:
    freeze, norm = {"@freeze": {"@fixed": {"w": W}}}, {"@weight_norm": {"g": W, "v": W}}
    raw = {"a": {"kernel": freeze, "bias": W}, "b": {"kernel": freeze}, "c": {"kernel": norm}, "empty": {"inner": {}}}
    free, fixed = base.split_collections(raw)
    assert jax.tree.structure(free) == jax.tree.structure(
        {"a": {"bias": 0}, "c": {"kernel": {"@weight_norm": {"g": 0, "v": 0}}}, "empty": {"inner": {}}}
    )
    assert jax.tree.structure(fixed) == jax.tree.structure(
        {"a": {"kernel": {"@freeze": {"@fixed": {"w": 0}}}}, "b": {"kernel": {"@freeze": {"@fixed": {"w": 0}}}}}
    )
    assert jax.tree.structure(base.join_collections(free, fixed)) == jax.tree.structure(raw)
    assert base.split_collections({}) == ({}, {})
    assert base.split_collections({"b": {"kernel": freeze}})[0] == {}


@pytest.mark.parametrize(
    ("module", "library", "text"),
    [
        (of_nnx, "flax.nnx", "rpx.nnx needs flax, which is not installed. Write `pip install flax`."),
        (of_linen, "flax.linen", "rpx.linen needs flax, which is not installed. Write `pip install flax`."),
        (of_equinox, "equinox", "rpx.equinox needs equinox, which is not installed. Write `pip install equinox`."),
        (of_haiku, "haiku", "rpx.haiku needs haiku, which is not installed. Write `pip install dm-haiku`."),
    ],
    ids=lambda x: x if isinstance(x, str) and " " not in x else "",
)
def test_a_wrapper_tells_which_package_it_needs(monkeypatch: Any, module: Any, library: str, text: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(text)}$"):
        importlib.reload(module)  # which ends there, before it defines anything


def test_a_library_that_is_missing_is_named_and_not_one_that_it_needs(monkeypatch: Any) -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"^me needs no_such_library, which is not installed\. Write `pip install x`"
    ):
        base.import_library("no_such_library.part", "me", "x")

    def broken(_: str) -> None:
        raise ModuleNotFoundError("of another", name="another.part")

    monkeypatch.setattr(base.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match=r"^of another$"):
        base.import_library("library", "me", "x")


# ---- equinox


@pytest.mark.parametrize(
    ("call", "args", "kwargs", "key", "kept"),
    [
        (lambda x: x, (1,), {}, None, {}),
        (lambda x: x, (1,), {"key": 2}, 2, {}),
        (lambda x, *, key=None: x, (1,), {"key": 2}, 2, {"key": 2}),
        (lambda x, key=None: x, (1, 2), {}, 2, {}),
        (lambda x, rate=0, key=None: x, (1, 3), {}, None, {}),
        (lambda x, rate=0, key=None: x, (1, 3, 2), {}, 2, {}),
        (lambda x, rate=0: x, (1, 3), {"key": 2, "rate": 5}, 2, {"rate": 5}),
        (lambda x, **more: x, (1,), {"key": 2, "a": 3}, 2, {"key": 2, "a": 3}),
        (lambda x: x, (1, 2, 3), {"key": 4}, 4, {}),
        (lambda x: x, (1, 2, 3), {}, None, {}),
    ],
)
def test_a_key_is_found_by_name_or_by_position(call: Any, args: Any, kwargs: Any, key: Any, kept: Any) -> None:
    assert of_equinox._split_key(inspect.signature(call), args, kwargs) == (key, kept)


def test_only_fixed_values_that_could_train_are_hidden() -> None:
    node = {"w": {"@freeze": {"@fixed": {"w": W.astype(np.float16)}}}}
    quantized = {"@quantized": {"@fixed": {"q": np.ones(2, np.int8), "scale": W}}}
    found = jax.eval_shape(lambda: of_equinox._hide_fixed(node | {"b": W, "n": np.ones(2, np.int8), "q": quantized}))
    hidden, kept = found["w"]["@freeze"]["@fixed"]["w"], found["q"]["@quantized"]["@fixed"]
    assert (hidden.bits.dtype, hidden.dtype) == (np.uint16, np.float16)
    assert (kept["q"].dtype, kept["scale"].bits.dtype) == (np.int8, np.uint32)
    assert [found[name].dtype for name in "bn"] == [np.float32, np.int8]
    others = {"f": jnp.tanh, "rate": 0.5, "b": W}
    assert of_equinox._hide_fixed(others) == others


def test_an_equinox_model_passes_keys_and_gradients_on() -> None:
    wrapper: Any = rpx.equinox.Parametrized
    owner = SimpleNamespace(p=Chain(), raw="raw", replace=lambda raw: raw)
    assert wrapper.update(owner, "key", "grads") == ("update", "raw", "key", "grads")
    assert wrapper.update(owner) == ("update", "raw", None, None)
    assert wrapper.effective(owner, "key") == ("apply", "raw", "key")
    owner.p.stochastic = False
    assert wrapper.effective(owner, "key") == ("apply", "raw", None)


# ---- linen


class Twice(nn.Module):
    """A part that is called twice, also while it starts."""

    p: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        part = rpx.linen.parametrized(nn.Dense(3, parent=None, name="lost"), self.p, name="part")
        return part(part(x))


@pytest.mark.parametrize("p", [rpx.WeightNorm(), rpx.Freeze(), rpx.Freeze(where="kernel"), rpx.LoRA(1)], ids=repr)
def test_a_part_that_is_called_twice_starts_once(p: Any, monkeypatch: Any) -> None:
    started: list[Any] = []
    start = base.Functions.start
    monkeypatch.setattr(base.Functions, "start", lambda *args, **how: started.append(None) or start(*args, **how))
    variables = jax.eval_shape(Twice(p).init, jax.random.key(0), X)
    assert len(started) == 1
    kinds = {(kind, name) for kind, parts in variables.items() for name in parts}
    assert kinds <= {("params", "part"), ("fixed", "part")}
    raw = jax.eval_shape(p.init, {"kernel": W[:, :1] @ np.ones((1, 3), np.float32), "bias": W[:, 0]}, jax.random.key(0))
    free, fixed = base.split_collections(raw)
    assert jax.tree.structure(variables.get("params", {}).get("part", {})) == jax.tree.structure(free)
    assert jax.tree.structure(variables.get("fixed", {}).get("part", {})) == jax.tree.structure(fixed)
    assert jax.eval_shape(Twice(p).apply, variables, X).shape == (4, 3)


class Noisy(nn.Module):
    """Two parts with noise."""

    @nn.compact
    def __call__(self) -> Any:
        p = rpx.VarNoise(0.5)
        parts = [rpx.linen.parametrized(Weight(parent=None), p, name=name) for name in "ab"]
        return [part() for part in (*parts, parts[0])]


class Weight(nn.Module):
    @nn.compact
    def __call__(self) -> Any:
        return self.param("kernel", nn.initializers.zeros, (2, 2))


def test_each_part_and_each_call_draws_noise_of_its_own() -> None:
    variables = {"params": {name: {"kernel": jnp.zeros((2, 2))} for name in "ab"}}
    found = [np.asarray(x) for x in Noisy().apply(variables, rngs={"noise": jax.random.key(0)})]
    assert all(np.abs(found[i] - found[j]).min() > 1e-3 for i, j in ((0, 1), (0, 2), (1, 2)))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, train: bool = False) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(2)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


def test_a_call_that_trains_must_be_able_to_update_fixed_values() -> None:
    p = rpx.SpectralNorm(where=".*kernel")
    module = rpx.linen.parametrized(Normed(), p)
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    assert variables.keys() == {"params", "fixed", "batch_stats"}

    def changed(*mutable: str, module: Any = module) -> set[str]:
        how = {"train": True, "mutable": list(mutable), "rngs": {"dropout": jax.random.key(0)}}
        return set(jax.eval_shape(lambda variables: module.apply(variables, X, **how)[1], variables))

    assert changed("fixed", "batch_stats") == {"fixed", "batch_stats"}
    with pytest.raises(
        ValueError, match=r"updates fixed values in each call that trains, but in this call 'batch_stats'"
    ):
        changed("batch_stats")
    for still in (module.deterministic, rpx.linen.parametrized(Normed(), p, updates="by hand")):
        assert changed("batch_stats", module=still) == {"batch_stats"}


def test_roles_of_a_module_with_statistics_are_found() -> None:
    roles = rpx.linen.roles(Normed(), X, train=True)
    assert roles["Dense_0"]["kernel"].outputs == (1,)


def test_a_copy_has_the_name_and_the_updates_of_a_module() -> None:
    module = rpx.linen.parametrized(Normed(name="lost"), rpx.SpectralNorm(), name="layer", updates="by hand")
    other = pickle.loads(pickle.dumps(module))
    assert (other.name, other.updates, other.p, other) == ("layer", "by hand", module.p, module)
    assert module.deterministic.updates == "by hand"
    assert module.module.name is None


# ---- haiku


def test_a_network_without_a_key_is_wrapped_where_nothing_is_drawn() -> None:
    plain = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2, name="l")(x)))
    network = rpx.haiku.parametrized(plain, rpx.Freeze())
    raw = network.start({"l": {"w": W, "b": W[0]}})
    assert jax.eval_shape(network.apply, raw, X).shape == (4, 2)
    still = rpx.haiku.parametrized(hk.transform(lambda x: hk.Linear(2, name="l")(x)), rpx.VarNoise(0.1)).deterministic
    assert jax.eval_shape(lambda raw: still.apply(raw, None, X), {"l": {"w": W, "b": W[0]}}).shape == (4, 2)


# ---- nnx


def test_a_stream_is_the_one_of_the_name_or_the_default() -> None:
    rngs, other = nnx.Rngs(0, noise=1), nnx.Rngs(dropout=2)
    found = [of_nnx._find_stream(rngs, name) for name in ("noise", "params")]
    assert found[0] is rngs.noise
    assert found[1] is rngs.default or found[1] is rngs.params
    assert of_nnx._find_stream(other, "noise") is None
    assert of_nnx._find_stream(other.dropout, "noise") is other.dropout
    assert of_nnx._find_stream(None, "noise") is None


@pytest.mark.parametrize(
    ("callers", "want"),
    [
        (["flax.nnx.transforms.general"], True),
        (["flax.nnx.variablelib", "jax._src.pjit", "flax.nnx.transforms.compilation"], True),
        (["flax.nnx.variablelib"], False),
        (["flax.nnx.variablelib", "mine", "flax.nnx.transforms.compilation"], False),
        (["flaxen", "flax.nnx.transforms.compilation"], False),
        ([], False),
    ],
)
def test_a_transform_is_known_by_its_callers(callers: list[str], want: Any) -> None:
    def call() -> bool:
        return of_nnx._is_called_by_transform()

    for name in callers:
        made: dict[str, Any] = {"__name__": name, "inner": call}
        exec("def call(): return inner()", made)
        call = made["call"]
    assert call() is want


VARIABLE = nnx.Variable(np.ones(2))


@pytest.mark.parametrize(
    ("value", "before", "want"),
    [
        (W, W, True),
        (W, W.copy(), False),
        (1, 1, True),
        (1, 2, False),
        (1, True, False),
        (1, 1.0, False),
        ("a", "a", True),
        ((1, "a"), (1, "a"), True),
        ((1, 2), (1,), False),
        ([1, 2], (1, 2), False),
        ([1, W], [1, W], True),
        ([1, W], [1, W.copy()], False),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, False),
        (None, None, True),
        (None, 0, False),
        ([VARIABLE], [VARIABLE], True),
        ([VARIABLE], [nnx.Variable(np.ones(2))], False),
    ],
)
def test_an_attribute_is_the_same_if_its_parts_are(value: Any, before: Any, want: Any) -> None:
    assert of_nnx._is_same(value, before) is want


class Leaf(nnx.Module):
    """A layer that counts its calls, remembers its input and forgets its first one; it computes nothing."""

    def __init__(self, i: int) -> None:
        self.kernel = nnx.Param(np.full((2, 2), i, np.float32))
        self.calls, self.first, self.memory, self.deterministic = 0, "first", nnx.data(None), False

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        self.memory = nnx.data(nnx.Cache(x))
        self.notes = ("note", self.calls)
        if "first" in vars(self):
            del self.first
        return self.kernel[...], x

    def grow(self) -> None:
        self.other = nnx.Param(np.ones(2))

    def swap(self) -> None:
        self.kernel = nnx.Param(np.ones(2))

    def drop(self) -> None:
        del self.kernel


class Tree(nnx.Module):
    """Layers in a list, in a dict of nnx, in a dict of Python, and at two places."""

    def __init__(self) -> None:
        self.one = Leaf(1)
        self.same = self.one
        self.layers = nnx.List([Leaf(2), Leaf(3)])
        self.table = nnx.Dict({"a": Leaf(4), "b": Leaf(5)})
        self.plain = nnx.data({"c": Leaf(6)})
        self.count = nnx.Variable(np.zeros(()))

    def __call__(self, x: Any) -> Any:
        return self.one(x), self.layers[1](x)

    @property
    def inner(self) -> Any:
        return self.table["b"]

    def set_view(self, **kwargs: Any) -> Any:
        return kwargs


SAME = rpx.numbers.Elementwise(lambda x: x, lambda w: w, where=".*kernel")


def tree(**options: Any) -> Any:
    return rpx.nnx.Parametrized(Tree(), SAME, **options)


def number(part: Any) -> float:
    """The number that a layer holds, as a call returns it."""
    return float(np.asarray(part(W)[0])[0, 0])


def test_parts_of_a_model_are_called_where_they_are_and_leave_what_they_set() -> None:
    ours = tree()
    assert [number(part) for part in ours.layers] == [2, 3]
    assert [number(part) for _, part in ours.table.items()] == [4, 5]
    assert [number(part) for part in ours.table.values()] == [4, 5]
    assert [number(x) for x in (ours.layers[-1], ours.table["b"], ours.plain["c"], ours.inner, ours.same)] == [
        3,
        5,
        6,
        5,
        1,
    ]
    assert type(ours.plain) is dict
    assert (len(ours.layers), list(ours.plain), repr(ours.one).startswith("a part of rpx.nnx.Parametrized, Leaf(")) == (
        2,
        ["c"],
        True,
    )
    assert [x.calls for x in (*ours.layers, ours.one, ours.same, ours.raw.one, ours.table["a"])] == [1, 2, 1, 1, 1, 2]
    ours(W)
    raw = ours.raw.one
    assert (raw.calls, raw.notes, "first" in vars(raw)) == (2, ("note", 2), False)
    np.testing.assert_array_equal(raw.memory[...], W)
    assert type(raw.memory) is nnx.Cache
    assert not any(isinstance(x, int | str) for x in jax.tree.leaves(ours.raw))  # counts and notes are no arrays
    ours.one.calls = 7
    ours.one.new = "new"
    ours.count[...] = np.float32(3)
    assert (ours.same.calls, ours.raw.one.new, float(ours.raw.count[...])) == (7, "new", 3)
    ours.other = 5
    assert ours.raw.other == 5
    ours.layers[1].eval()
    assert [x.deterministic for x in (ours.one, *ours.layers)] == [False, False, True]


@pytest.mark.parametrize(
    "change",
    [
        lambda ours: setattr(ours.one, "kernel", nnx.Param(W)),
        lambda ours: setattr(ours.one, "kernel", None),
        lambda ours: setattr(ours, "one", None),
        lambda ours: setattr(ours, "new", nnx.Param(W)),
        lambda ours: setattr(ours, "new", [Leaf(1)]),
        lambda ours: setattr(ours.one, "calls", nnx.Param(W)),
        lambda ours: ours.one.grow(),
        lambda ours: ours.same.swap(),
        lambda ours: ours.layers[0].drop(),
        lambda ours: ours.layers.__setitem__(0, Leaf(1)),
        lambda ours: ours.layers.append(Leaf(1)),
        lambda ours: ours.one.kernel.set_value(W),
        lambda ours: ours.one.kernel.copy_from(nnx.Param(W)),
        lambda ours: ours.one.kernel.__setitem__(0, 1.0),
        lambda ours: nnx.update(ours.one, {"kernel": W}),
        lambda ours: nnx.state(ours.one),
        lambda ours: nnx.clone(ours.one),
        lambda ours: nnx.Sequential(ours.one),
    ],
)
def test_a_change_of_parameters_is_refused_and_changes_nothing(change: Any) -> None:
    ours = tree()
    graph, before = nnx.split(ours.raw)
    with pytest.raises((TypeError, ValueError), match=r"rpx\.nnx\.Parametrized"):
        change(ours)
    after_graph, after = nnx.split(ours.raw)
    assert after_graph == graph
    assert jax.tree.all(jax.tree.map(np.array_equal, after, before))


def test_a_raw_model_has_the_parameters_of_the_model_and_no_others() -> None:
    for more, less in ((Tree(), tree().raw), (tree().raw, Tree())):
        more.one.extra = nnx.Param(W)
        model, raw = (more, less) if type(more.one.kernel) is nnx.Param else (less, more)
        with pytest.raises(ValueError, match="only one of the two has a parameter at 'one/extra'"):
            rpx.nnx.Parametrized(model, SAME, raw=raw)


def test_streams_are_taken_where_something_draws_or_updates() -> None:
    for p, has_stream, draws in (
        (SAME, False, 0),
        (rpx.VarNoise(0.1, where=".*kernel"), True, 0),
        (rpx.SpectralNorm(columns=-1, where="one/kernel"), True, 0),
        (rpx.Freeze(where="one/kernel") >> rpx.LoRA(1, columns=-1, where="one/kernel"), False, 1),
    ):
        rngs = nnx.Rngs(params=0, noise=1)
        wrapped = rpx.nnx.Parametrized(Tree(), p, rngs=rngs)
        assert (wrapped.rngs is not None, int(rngs.params.count[...])) == (has_stream, draws)
        assert wrapped.rngs is not rngs.noise


def test_values_that_train_have_the_type_of_the_trainer_and_the_model_its_own() -> None:
    class Mine(nnx.Param):
        pass

    model = Tree()
    model.one.kernel = nnx.LoRAParam(model.one.kernel[...], mark="kept")
    p = rpx.Freeze(where="layers/0/kernel") >> SAME
    wrapped = rpx.nnx.Parametrized(model, p, variable=Mine)
    raw = wrapped.raw
    kinds = {type(x) for x in jax.tree.leaves(raw.layers[0].kernel, is_leaf=lambda x: isinstance(x, nnx.Variable))}
    assert kinds == {rpx.nnx.Fixed}
    (x,) = jax.tree.leaves(raw.one.kernel, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert (type(x), x.get_metadata()["mark"], x.get_metadata()["plain"]) == (Mine, "kept", nnx.LoRAParam)
    for back in (wrapped.effective(), wrapped.fold()):
        assert (type(back.one.kernel), type(back.layers[0].kernel), back.one.kernel.get_metadata()["mark"]) == (
            nnx.LoRAParam,
            nnx.Param,
            "kept",
        )
        assert "plain" not in back.one.kernel.get_metadata()
