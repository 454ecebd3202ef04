"""Stages of one's own, whose formulas may read what changes between calls, as in a notebook."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import reparax as rpx
from reparax.core.leaf import _declares_terms
from reparax.core.matrices import RowsAndColumns

KEY = jax.random.key(0)
W = np.ones((2, 3), np.float32)


def helper(x):
    return 2 * x


class Own(rpx.Reparametrization):
    """Reads a global function, an attribute of its class, and a function in a tuple, as well as its raw value."""

    raw_values = {"x": rpx.stage.main(aligned=True)}
    starts_elsewhere = True
    gain = 1
    functions: tuple = ()

    def init_leaf(self, w):
        return {"x": w}

    def apply_leaf(self, values):
        x = helper(values["x"]) * self.gain
        return self.functions[0](x) if self.functions else x


class OwnDraw(rpx.Reparametrization):
    """The same with a draw, of which the formula uses nothing."""

    raw_values = {"x": rpx.stage.main(aligned=True)}
    starts_elsewhere = True
    stochastic = True

    def init_leaf(self, w):
        return {"x": w}

    def apply_leaf(self, values, key):
        return helper(values["x"])

    def mean_leaf(self, values):
        return helper(values["x"])


class OwnNoise(rpx.VarNoise):
    """A noise of this package with a formula of one's own."""

    def perturb(self, w, drawn):
        return helper(w)

    def merged_with(self, later):
        return None


class OwnTogether(rpx.stage.Joint):
    """A stage on several arrays."""

    starts_elsewhere = True

    def init_leaves(self, arrays):
        return {path: {"x": w} for path, w in arrays.items()}

    def apply_leaves(self, values):
        return {path: helper(held["x"]) for path, held in values.items()}


class OwnTerms(rpx.Reparametrization):
    """A stage that says its terms."""

    starts_elsewhere = True

    def init_leaf(self, w):
        return {"x": w}

    def terms_leaf(self, values):
        return [rpx.stage.Term("ij->ij", helper(values["x"]))]


class OwnBoth(OwnTerms):
    """One that says its terms as well as their sum."""

    def apply_leaf(self, values):
        return helper(values["x"])

    def terms_leaf(self, values):
        return [rpx.stage.Term("ij->ij", helper(values["x"]))]


@pytest.mark.parametrize(
    ("base", "names", "declared"),
    [
        (Own, [], False),
        (Own, ["terms_leaf"], True),
        (OwnTerms, [], False),
        (OwnTerms, ["terms_leaf"], False),
        (OwnTerms, ["apply_leaf"], False),
        (OwnBoth, [], True),
        (OwnBoth, ["terms_leaf"], True),
        (OwnBoth, ["apply_leaf"], False),
    ],
)
def test_terms_are_recorded_where_they_belong_to_the_formula(base, names, declared):
    cls = type("OwnSum", (base,), {name: getattr(OwnBoth, name) for name in names})
    assert _declares_terms(cls) == declared
    assert names != ["terms_leaf"] or cls.apply_leaf is base.apply_leaf
    program = str(jax.make_jaxpr(cls().apply)({"w": {f"@{cls.kind}": {"x": W}}}))
    assert ("sum_of_terms" in program) == declared


class UsedUp(rpx.Reparametrization):
    """Formulas that take what they need out of their arguments, and return the second of two values as it is."""

    raw_values = {"n": rpx.stage.fixed(), "x": rpx.stage.main(aligned=True)}

    def init_leaf(self, w):
        return {"n": jnp.zeros_like(w), "x": w}

    def apply_leaf(self, values):
        return values.pop("x") if values.pop("n") is not None else None

    def update_leaf(self, values):
        return {"n": values.pop("n") + jnp.sum(values.pop("x"))}

    update_base_leaf = update_leaf

    def penalty_leaf(self, values):
        return jnp.sum(values.pop("n") + values.pop("x"))

    log_det_leaf = penalty_leaf


class UsedUpAtRandom(UsedUp):
    stochastic = True

    def apply_leaf(self, values, key):
        return UsedUp.apply_leaf(self, values)

    mean_leaf = UsedUp.apply_leaf


@pytest.mark.parametrize("cls", [UsedUp, UsedUpAtRandom])
@pytest.mark.parametrize("stacked", [(), 1])
def test_formulas_may_use_up_their_arguments(cls, stacked):
    p = cls(where=lambda path, w: w.shape == (2, 3), stacked=stacked)
    raw = jax.eval_shape(p.init, {"w": W})
    assert jax.tree.structure(p.init({"w": W})) == jax.tree.structure(raw)
    numbers = {"w": {f"@{p.kind}": {"@fixed": {"n": W}, "x": 2 * W}}}
    np.testing.assert_array_equal(p.apply(numbers, KEY)["w"], 2 * W)
    for verb in ("update", "update_base"):
        after = getattr(p, verb)(numbers)["w"][f"@{p.kind}"]
        np.testing.assert_array_equal(after["x"], 2 * W)
        np.testing.assert_array_equal(after["@fixed"]["n"], W + (2 * W).sum(0 if stacked else None))
    for verb in ("penalty", "log_det") if cls is UsedUp else ("penalty",):
        assert jax.eval_shape(getattr(p, verb), raw).shape == ()


class OwnCount(rpx.Reparametrization):
    """Counts its updates."""

    raw_values = {"x": rpx.stage.main(aligned=True), "n": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"x": w, "n": jnp.zeros(())}

    def apply_leaf(self, values):
        return values["x"]

    def update_leaf(self, values):
        return {"n": values["n"] + 1}


class OwnLong(Own):
    """An array of at least two rows, of which the start decides by the shape."""

    def init_leaf(self, w):
        if len(w) < 2:
            raise ValueError("expected two rows")
        return {"x": w}


def test_a_start_that_decides_by_shapes_is_not_asked_for_symbols():
    (n,) = jax.export.symbolic_shape("n")
    raw = {"w": {f"@{OwnLong.kind}": {"x": jax.ShapeDtypeStruct((n, 3), np.float32)}}}
    assert jax.eval_shape(OwnLong(where=".*").apply, raw)["w"].shape == (n, 3)


class OwnStart(OwnCount):
    """A start that draws where it gets a key, and does not need one."""

    random_init = False

    def init_leaf(self, w, key):
        return {"x": w, "n": jax.random.uniform(key)}


def test_a_start_that_may_draw_draws_by_a_fixed_key_without_one():
    drawn = [
        OwnStart().init({"w": W}, *key)["w"]["@own_start"]["@fixed"]["n"] for key in ([], [KEY], [jax.random.key(1)])
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def numbers_of(p, raw, w="w"):
    """One entry of the effective array, by each way to compute it; and its slope."""

    def entry(raw):
        return p.apply(raw, KEY)[w].ravel()[0]

    slopes = jax.tree.leaves(jax.grad(lambda raw: entry(raw) + 0 * sum(map(jnp.sum, jax.tree.leaves(raw))))(raw))
    return [
        float(entry(raw)),
        float(p.fold(raw)[w].ravel()[0]),
        float(jax.jit(lambda raw: entry(raw))(raw)),
        float(sum(map(jnp.sum, slopes))),
    ]


@pytest.mark.parametrize(
    "p",
    [Own(), Own(stacked=0), Own() >> Own(where=".*"), OwnDraw(), OwnNoise(0.1), OwnTogether(), OwnTerms()],
    ids=lambda p: f"{p}",
)
def test_a_helper_defined_anew(p, monkeypatch):
    raw, folded = p.init({"w": W}), len(p.deterministic)  # the mean of noise is the weight
    assert numbers_of(p, raw) == [2 ** len(p), 2**folded, 2 ** len(p), 2 ** len(p)]
    monkeypatch.setitem(globals(), "helper", lambda x: 5 * x)
    assert numbers_of(p, raw) == [5 ** len(p), 5**folded, 5 ** len(p), 5 ** len(p)]


def test_an_attribute_of_the_class_set_anew(monkeypatch):
    p = Own()
    raw = p.init({"w": W})
    assert numbers_of(p, raw) == [2] * 4
    monkeypatch.setattr(Own, "gain", 3)
    assert numbers_of(p, raw) == [6] * 4
    monkeypatch.setattr(Own, "apply_leaf", lambda self, values: 7 * values["x"])
    assert numbers_of(p, raw) == [7] * 4


def test_a_start_and_an_update_that_take_more_later(monkeypatch):
    p, params, grads = OwnCount(), {"w": W}, {"w": np.full_like(W, 2)}
    raw = p.init(params)
    assert p.update(raw)["w"]["@own_count"]["@fixed"]["n"] == 1
    monkeypatch.setattr(OwnCount, "update_leaf", lambda self, values, grad: {"n": values["n"] + jnp.sum(grad)})
    assert p.update(raw)["w"]["@own_count"]["@fixed"]["n"] == 0  # as for each stage that reads a gradient, without one
    assert p.update(raw, grads=grads)["w"]["@own_count"]["@fixed"]["n"] == 12
    monkeypatch.setattr(OwnCount, "init_leaf", lambda self, w, key: {"x": w, "n": jax.random.uniform(key)})
    starts = [float(p.init(params, jax.random.key(i))["w"]["@own_count"]["@fixed"]["n"]) for i in range(2)]
    assert p.random_init
    assert 0 < starts[0] != starts[1] > 0


def test_a_variable_of_a_closure_changed():
    slope = 3
    p = Own((lambda x: slope * x,))
    raw = p.init({"w": W})
    assert numbers_of(p, raw) == [6] * 4
    slope = 4
    assert numbers_of(p, raw) == [8] * 4


def test_what_a_call_traces_serves_all_arrays_of_a_type_in_it(monkeypatch):
    traced = []
    monkeypatch.setitem(globals(), "helper", lambda x: traced.append(x.shape) or x)
    p = Own()
    params = {"a": W, "b": W, "c": W, "d": W[:1]}
    raw = p.init(params)
    del traced[:]
    p.apply(raw)  # once for the type of the array, and once for its numbers
    assert sorted(traced) == [(1, 3), (1, 3), (2, 3), (2, 3)]
    jax.jit(lambda raw: p.apply(raw))(raw)
    assert len(traced) == 8


class Phase(rpx.Reparametrization):
    """Numbers on the circle, by angles: an aligned value of another dtype."""

    raw_values = {"t": rpx.stage.main(aligned=True)}
    dtypes = jnp.complexfloating

    def init_leaf(self, w):
        return {"t": jnp.angle(w)}

    def apply_leaf(self, values):
        return jax.lax.complex(jnp.cos(values["t"]), jnp.sin(values["t"]))

    def penalty_leaf(self, values):
        return jnp.sum(values["t"] ** 2)

    def update_leaf(self, values):
        return {}


class InFloat32(rpx.Reparametrization):
    """Only arrays of bfloat16, by a default of its own, kept as float32."""

    raw_values = {"v": rpx.stage.main(aligned=True)}

    def default(self, w):
        return w.dtype == jnp.bfloat16

    def init_leaf(self, w):
        return {"v": w.astype(jnp.float32)}

    def apply_leaf(self, values):
        return values["v"].astype(jnp.bfloat16)

    def penalty_leaf(self, values):
        return jnp.sum(values["v"] ** 2)


ANGLES = np.array([0.0, 0.5, -1.5], np.float32)


@pytest.mark.parametrize(
    ("p", "w", "value", "penalty"),
    [
        (Phase(), np.exp(1j * ANGLES), ANGLES, 2.5),
        (Phase(where=lambda path, x: x.dtype == np.complex64), np.exp(1j * ANGLES), ANGLES, 2.5),
        (InFloat32(), np.array([1.0, 2.0], jnp.bfloat16), np.array([1.0, 2.0], np.float32), 5.0),
    ],
    ids=["complex", "by a predicate", "bfloat16"],
)
def test_an_aligned_value_of_another_dtype_than_the_array(p, w, value, penalty):
    params = {"w": w, "x": np.ones(2, np.float32)}
    raw = p.init(params)
    np.testing.assert_allclose(jax.tree.leaves(raw["w"])[0], value, atol=1e-6)
    for effective in (p.apply(raw), p.fold(raw), jax.jit(p.apply)(raw), p.apply(p.update(raw))):
        np.testing.assert_allclose(effective["w"], w, atol=1e-6)
    np.testing.assert_allclose(p.penalty(raw), penalty, rtol=1e-6)
    p.check(raw, like=params)
    np.testing.assert_allclose(p.apply(p.set(raw, "w", w[::-1]))["w"], w[::-1], atol=1e-6)


class Priced(RowsAndColumns):
    """A stage on matrices whose penalty is a number of Python."""

    raw_values = {"m": rpx.stage.main(axes=("rows", "columns"))}

    def init_leaf(self, w):
        return {"m": w}

    def apply_leaf(self, values):
        return values["m"]

    def penalty_leaf(self, values):
        return 1.5


class PricedTogether(OwnTogether):
    """The sum of all entries of several arrays."""

    def penalty_leaves(self, values):
        return sum(jnp.sum(held["x"]) for held in values.values())


def test_a_penalty_is_a_number_of_python_or_a_sum_in_float32():
    three = {name: jnp.ones((2, 3)) for name in "xyz"}
    for p in (Priced(), Priced(columns=0, where=".*")):
        assert p.penalty(p.init(three)) == 4.5
    p, many = PricedTogether(), {"w": jnp.ones(257, jnp.bfloat16)}
    assert p.penalty(p.init(many)) == 257  # which bfloat16 rounds to 256


class OfEvenMatrices(rpx.Reparametrization):
    """Both questions ask an array for what its type alone does not have."""

    raw_values = {"v": rpx.stage.main(aligned=True)}

    def default(self, w):
        return super().default(w) and w.T.ndim == 2

    def refuse_leaf(self, w):
        return None if len(w.real) % 2 == 0 else "expected an even number of rows."

    def init_leaf(self, w):
        return {"v": w}

    def apply_leaf(self, values):
        return values["v"]


def test_questions_of_an_author_are_asked_of_arrays_also_where_only_types_are_known():
    p, types = OfEvenMatrices(), {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
    shardings = p.shardings({"w": P("rows", None)}, AbstractMesh((2,), ("rows",)), like=types)
    assert shardings["w"]["@of_even_matrices"]["v"].spec == P("rows", None)
    boxed = p.init({"w": nn.Partitioned(jnp.ones((4, 2)), ("in", "out"))})
    assert boxed["w"]["@of_even_matrices"]["v"].names == ("in", "out")
    assert (p >> OwnNoise(0.1)).apply(p.init({"w": jnp.ones((4, 2))}), jax.random.key(0))["w"].shape == (4, 2)
