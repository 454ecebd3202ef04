"""Optimizers whose states are held in few bits between steps, and updates of weights that have few bits."""

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from compiled import init
from errors import raises
from flax import nnx
from grids import mostly_thorough
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import reparax as rpx
from reparax.training._optimizer import has_columns

EIGHT = rpx.Moments8bit(min_size=1)
DYNAMIC = rpx.Stored("dynamic8", block=256)
TWO = rpx.Stored("dynamic8", block=256, where=r".*/mu/.*/kernel.*") >> rpx.Stored(
    "udynamic8", block=256, where=r".*/nu/.*/kernel.*"
)


@pytest.fixture(autouse=True)
def promotion():
    """Adam raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype), dtype)


def by_name(state, name):
    """The numbers of the moments called ``name``, by path."""
    from reparax.training._held import open_state

    return getattr(open_state(state)[0][0], name)


@jax.jit
def rounded(p, params):
    return p.apply(p.init(params))


def test_a_step_decodes_steps_and_encodes():
    w, grads = {"w": normal(512, 2)}, [{"w": normal(512, 2, seed=i)} for i in (1, 2, 3)]
    tx, plain = rpx.optimizer(optax.adam(0.1), state=EIGHT), optax.adam(0.1)
    state, numbers = jax.jit(tx.init)(w), jax.jit(plain.init)(w)
    for grad in grads:
        updates, state = jax.jit(tx.update)(grad, state, w)
        want, numbers = jax.jit(plain.update)(grad, numbers, w)
        np.testing.assert_allclose(updates["w"], want["w"], rtol=1e-5, atol=1e-6)
        # What stands between two steps is the stage's own rounding of what the step made.
        held = [rounded(EIGHT, m) for m in (numbers[0].mu, numbers[0].nu)]
        numbers = (numbers[0]._replace(mu=held[0], nu=held[1]), *numbers[1:])
        np.testing.assert_allclose(by_name(state, "mu")["w"], held[0]["w"], rtol=0.02, atol=1e-6)


@pytest.mark.parametrize(("p", "most"), [(rpx.Moments8bit(), 2.08), (rpx.Moments8bit(along=-1), 2.05), (TWO, 2.04)])
def test_bytes_for_each_weight(p, most):
    params = {"dense": {"kernel": jax.ShapeDtypeStruct((1024, 512), np.float32)}}
    params["conv"] = {"kernel": jax.ShapeDtypeStruct((3, 3, 256, 128), np.float32)}
    state = jax.eval_shape(rpx.optimizer(optax.adam(1e-3), state=p).init, params)
    sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (state, params)]
    assert sizes[0] / (sizes[1] / 4) <= most


def digits():
    data = load_digits()
    x, labels = np.asarray(data.data, np.float32) / 16, np.asarray(data.target)
    return x[:1400], labels[:1400], x[1400:], labels[1400:]


def network(seed):
    rng = np.random.default_rng(seed)
    sizes = [(64, 64), (64, 10)]
    return [
        {"kernel": jnp.asarray(rng.standard_normal(s).astype(np.float32)) / 8, "bias": jnp.zeros(s[1])} for s in sizes
    ]


def loss(params, x, labels):
    first, second = params
    x = jnp.tanh(x @ first["kernel"] + first["bias"][None])
    logits = jax.nn.log_softmax(x @ second["kernel"] + second["bias"][None])
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


def trained(tx, seed, steps=1000, p=None):
    """The loss on held-out digits after steps of Adam."""
    p = p or rpx.Chain()
    x, labels, unseen, others = digits()
    order = jnp.asarray(np.random.default_rng(seed).integers(0, 1400, (steps, 64)))

    def step(carry, batch):
        raw, state = carry
        free, fixed = rpx.partition(raw)

        def own(free):
            return loss(p.apply(rpx.combine(free, fixed)), jnp.asarray(x)[batch], jnp.asarray(labels)[batch])

        updates, state = tx.update(jax.grad(own)(free), state, free)
        return (rpx.apply_updates(raw, updates), state), None

    run = jax.jit(lambda raw: p.apply(jax.lax.scan(step, (raw, tx.init(rpx.partition(raw)[0])), order)[0][0]))
    return float(loss(run(p.init(network(seed))), jnp.asarray(unseen), jnp.asarray(others)))


@pytest.mark.thorough
def test_a_thousand_steps_of_adam_end_where_those_in_float32_do():
    held = rpx.optimizer(optax.adam(1e-3), state=EIGHT)
    ways = {"float32": (optax.adam(1e-3), None), "held": (held, None)}
    runs = {name: [trained(tx, seed, p=p) for seed in range(5)] for name, (tx, p) in ways.items()}
    for name, losses in runs.items():
        error = np.sqrt(sum(np.var(each, ddof=1) / len(each) for each in (losses, runs["float32"])))
        print(name, np.mean(losses), error)
        assert abs(np.mean(losses) - np.mean(runs["float32"])) <= 2 * error


def test_states_in_few_bits_are_donated_saved_and_restored(tmp_path):
    w = {"w": normal(512, 2)}
    tx = rpx.optimizer(optax.adam(0.1), state=EIGHT)
    state = jax.jit(tx.init)(w)
    step = jax.jit(lambda state: tx.update(w, state, w)[1], donate_argnums=0)
    new = step(jax.tree.map(jnp.copy, state))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    old = jax.tree.leaves(state)
    step(state)
    assert all(x.is_deleted() for x in old)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "orbax", new)
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "orbax", jax.eval_shape(tx.init, w))
    assert eqx.tree_equal(restored, new)
    eqx.tree_serialise_leaves(tmp_path / "equinox", new)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(tmp_path / "equinox", jax.jit(tx.init)(w)), new)


@pytest.mark.thorough
def test_states_in_few_bits_lie_as_their_weights_do():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    p, params = rpx.WeightNorm(), {"dense": {"kernel": normal(512, 8)}}
    specs = p.shardings({"dense": {"kernel": P("x", "y")}}, mesh, like=params)
    raw = jax.tree.map(jax.device_put, p.init(params), specs)
    tx = rpx.optimizer(optax.adam(0.1), state=rpx.Moments8bit(min_size=1))
    shardings = rpx.training.state_shardings(jax.eval_shape(tx.init, raw), raw, specs)
    held = shardings[0].mu["dense"]["kernel"]["@weight_norm"]["v"].raw["@moments8bit"]["@fixed"]
    want = {"q": P("x", "y"), "signed": P(), "scale_0": P("x", "y")}
    assert {name: x.spec for name, x in held.items()} == want
    state = jax.jit(tx.init, out_shardings=shardings)(raw)
    updates, _ = jax.jit(tx.update)(raw, state, raw)
    whole = p.init(params)
    want, _ = tx.update(whole, tx.init(whole), whole)
    np.testing.assert_allclose(
        updates["dense"]["kernel"]["@weight_norm"]["v"], want["dense"]["kernel"]["@weight_norm"]["v"], rtol=1e-5
    )


def test_moments_in_few_bits_are_reset_and_transferred():
    p = rpx.sparse.RigL(0.5, drop=0.5, where="w")
    before = init(p, {"w": normal(16, 16)}, jax.random.key(0))
    tx = rpx.optimizer(optax.sgd(0.1, momentum=0.9), state=EIGHT)

    @jax.jit
    def stepped(raw):
        return tx.update(jax.tree.map(jnp.ones_like, raw), tx.init(raw), raw)[1]

    state = stepped(before)
    after = jax.jit(lambda raw, grads: p.update(raw, grads=grads))(before, {"w": normal(16, 16, seed=1)})
    masks = [np.asarray(raw["w"]["@rigl"]["@fixed"]["mask"]) for raw in (before, after)]
    got = jax.jit(rpx.training.reset_moments)(state, before, after)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    born = (masks[0] == 0) & (masks[1] != 0)
    assert born.any()
    np.testing.assert_allclose(by_name(got, "trace")["w"]["@rigl"]["w"], np.where(born, 0, 1), atol=1e-6)
    new = rpx.WeightNorm(where="v") >> p
    like = {"w": before["w"], "v": normal(16, 16)}
    moved = jax.jit(lambda state, like: rpx.transfer(p, new, state, like))(stepped(like), like)
    fresh = jax.eval_shape(lambda like: tx.init(new.init(p.fold(like), jax.random.key(0))), like)
    assert jax.tree.structure(moved) == jax.tree.structure(fresh)
    np.testing.assert_allclose(by_name(moved, "trace")["w"]["@rigl"]["w"], np.ones((16, 16)), rtol=1e-6)
    assert not np.any(by_name(moved, "trace")["v"]["@weight_norm"]["v"])


@pytest.mark.parametrize("held", [EIGHT, rpx.Chain()])
def test_half_precision_is_stepped_in_float32(held):
    w = {"w": normal(512, 2, dtype=jnp.bfloat16)}
    tx = rpx.optimizer(optax.adam(1e-3), state=held)

    def stepped(w):
        updates, state = tx.update(w, tx.init(w), w)
        return updates["w"], by_name(state, "mu")["w"]

    assert [x.dtype for x in jax.eval_shape(stepped, w)] == [np.float32, np.float32]


apply_updates = jax.jit(rpx.apply_updates)


def test_a_mean_of_sums_rounded_by_chance_is_the_sum():
    params, updates = {"w": np.full(20_000, 1, jnp.bfloat16)}, {"w": np.full(20_000, 3e-4, np.float32)}
    got = np.asarray(apply_updates(params, updates, jax.random.key(0))["w"]).astype(np.float32)
    assert set(np.unique(got)) == {1.0, 1.0078125}
    assert abs(got.mean() - 1.0003) < 5 * got.std() / np.sqrt(20_000)
    assert np.all(np.asarray(apply_updates(params, updates)["w"]) == 1)
    ends = {"w": np.asarray([np.inf, -np.inf, np.nan], jnp.bfloat16)}
    kept = apply_updates(ends, {"w": np.zeros(3, np.float32)}, jax.random.key(0))["w"]
    np.testing.assert_array_equal(np.asarray(kept).astype(np.float32), [np.inf, -np.inf, np.nan])


def test_other_updates_are_those_of_optax():
    params = {
        "w": normal(4),
        "h": normal(4, dtype=np.float16),
        "c": normal(2, dtype=np.complex64),
        "i": np.arange(3, dtype=np.int32),
    }
    updates = {
        "w": normal(4, seed=1),
        "h": normal(4, seed=1, dtype=np.float16),
        "c": np.ones(2, np.float32),
        "i": np.ones(3, np.int32),
    }
    got, want = apply_updates(params, updates, jax.random.key(0)), jax.jit(optax.apply_updates)(params, updates)
    assert eqx.tree_equal(got, want)


def test_errors():
    with raises(
        TypeError,
        "optimizer takes a parametrization as state, but got a value of type 'str'. Pass one, as in "
        "`rpx.optimizer(tx, state=rpx.Moments8bit())`.",
    ):
        rpx.optimizer(optax.sgd(0.1), state="dynamic8")


def test_embeddings_have_moments_in_few_bits_too_and_vectors_have_not():
    shapes = {"embedding": (512, 2), "kernel": (512, 2), "bias": (512,)}
    raw = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    tx = rpx.optimizer(optax.trace(0.9), state=DYNAMIC)
    state = jax.eval_shape(tx.init, raw)
    sizes = {name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held)) for name, held in state.trace.items()}
    assert sizes == {"embedding": 1024 + 4 * 4, "kernel": 1024 + 4 * 4, "bias": 4 * 512}
    again = jax.eval_shape(rpx.optimizer(optax.trace(0.9), state=DYNAMIC).init, raw)
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_nnx_keeps_such_a_state_over_steps():
    raw, grad = {"w": normal(512, 2)}, {"w": normal(512, 2, seed=1)}
    tx = rpx.optimizer(optax.trace(0.9), state=DYNAMIC)
    params = nnx.State({"w": nnx.Param(raw["w"])})
    held, state = nnx.Optimizer(params, tx, wrt=nnx.Param), tx.init(raw)
    for _ in range(3):
        held.update(params, nnx.State({"w": nnx.Param(grad["w"])}))
        updates, state = tx.update(grad, state, raw)
        raw = optax.apply_updates(raw, updates)
    np.testing.assert_allclose(params["w"][...], raw["w"], rtol=1e-6)


def test_flax_writes_such_a_state_and_reads_it():
    raw = {"w": normal(512, 2)}
    tx = rpx.optimizer(optax.trace(0.9), state=DYNAMIC)
    state = tx.update(raw, tx.init(raw), raw)[1]
    again = flax.serialization.from_bytes(tx.init(raw), flax.serialization.to_bytes(state))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_an_optimizer_takes_a_state_in_either_form():
    raw = {"w": normal(512, 2)}
    plain, few = rpx.optimizer(optax.trace(0.9)), rpx.optimizer(optax.trace(0.9), state=DYNAMIC)
    state = few.update(raw, few.init(raw), raw)[1]
    got = plain.update(raw, state, raw)[1].trace["w"]
    want = raw["w"] + 0.9 * DYNAMIC.apply(DYNAMIC.init(raw))["w"]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert jax.tree.structure(few.update(raw, plain.init(raw), raw)[1]) == jax.tree.structure(state)


COARSE = {
    "int8": rpx.Stored("int8", block=256),
    "int4": rpx.Stored("int4", block=256),
    "uint8": rpx.Stored("uint8", block=256),
    "float8_e4m3fn": rpx.Stored("float8_e4m3fn", block=256),
    "dynamic8": DYNAMIC,
    "nf4": rpx.Stored("nf4", block=256),
    "gguf:q8_0": rpx.Stored("gguf:q8_0", block=256),
}


def refused(tx, state, w, where, **extra):
    held = rpx.optimizer(tx, state=state)
    shown = rpx.Stored(state.format, block=state.block, where=state.where or has_columns)
    with raises(
        ValueError,
        f"optimizer got state={shown!r} for {where!r}, by which the optimizer divides: in few bits small numbers "
        f"become 0 there, and steps become too long by orders of magnitude. Write `state=rpx.Moments8bit()`, or select "
        f"other arrays with `where`.",
    ):
        jax.eval_shape(lambda w: held.update(w, held.init(w), w, **extra), w)


@pytest.mark.parametrize("name", mostly_thorough(COARSE, "int8", "dynamic8"))
def test_a_format_in_which_small_numbers_become_zero_is_refused_for_what_the_optimizer_divides_by(name):
    refused(optax.adam(1e-3), COARSE[name], {"w": jax.ShapeDtypeStruct((512, 2), np.float32)}, "0/nu/w")


DIVIDING = {
    "adamax": (optax.adamax(1e-3), "0/nu/w"),
    "amsgrad": (optax.amsgrad(1e-3), "0/nu/w"),
    "adabelief": (optax.adabelief(1e-3), "0/nu/w"),
    "yogi": (optax.yogi(1e-3), "0/nu/w"),
    "adagrad": (optax.adagrad(1e-3), "0/sum_of_squares/w"),
    "adadelta": (optax.adadelta(1e-3), "1/e_g/w"),
    "adan": (optax.adan(1e-3), "0/n/w"),
    "rmsprop": (optax.rmsprop(1e-3, momentum=0.9, centered=True), "0/nu/w"),
    "lamb": (optax.lamb(1e-3), "0/nu/w"),
    "ademamix": (optax.contrib.ademamix(1e-3), "0/nu/w"),
    "madgrad": (optax.contrib.madgrad(1e-3), "1/grad_sum_sq/w"),
    "many steps": (optax.MultiSteps(optax.adam(1e-3), 4), "inner_opt_state/0/nu/w"),
    "injected": (optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), "inner_state/0/nu/w"),
    "by label": (optax.multi_transform({"a": optax.adam(1e-3)}, {"w": "a"}), "inner_states/a/inner_state/0/nu/w"),
}


@pytest.mark.parametrize("name", mostly_thorough(DIVIDING, "adagrad", "many steps", "injected"))
def test_what_an_optimizer_divides_by_is_read_from_its_program(name):
    tx, path = DIVIDING[name]
    refused(tx, COARSE["int8"], {"w": jax.ShapeDtypeStruct((512, 2), np.float32)}, path)


@pytest.mark.parametrize(
    ("tx", "state"),
    [
        (optax.sgd(1e-3, momentum=0.9), COARSE["int8"]),
        (optax.lion(1e-3), COARSE["int8"]),
        (optax.adam(1e-3), rpx.Stored("int8", block=256, where="0/mu/w")),
        (optax.adam(1e-3), rpx.Stored("udynamic8", block=256)),
        (optax.sm3(1e-3), COARSE["int8"]),
    ],
)
def test_other_arrays_may_have_any_format(tx, state):
    w = {"w": jax.ShapeDtypeStruct((512, 2), np.float32)}
    held = rpx.optimizer(tx, state=state)
    types = jax.eval_shape(lambda w: held.update(w, held.init(w), w)[1], w)
    assert any(x.dtype in (np.int8, np.uint8) for x in jax.tree.leaves(types))


def test_a_state_in_float32_is_refused_too_when_it_would_be_stored_so():
    w = {"w": jax.ShapeDtypeStruct((512, 2), np.float32)}
    plain, few = optax.adam(1e-3), rpx.optimizer(optax.adam(1e-3), state=COARSE["int8"])
    with pytest.raises(ValueError, match="by which the optimizer divides"):
        jax.eval_shape(lambda w: few.update(w, plain.init(w), w), w)


@pytest.mark.parametrize("wrap", [lambda tx: optax.MultiSteps(tx, 2), lambda tx: tx])
def test_eight_bits_work_in_and_around_other_transformations(wrap):
    w, grads = {"w": normal(64, 64)}, {"w": normal(64, 64, seed=1)}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=1e-2))
    labelled = optax.multi_transform({"a": inner}, {"w": "a"})
    tx, plain = rpx.optimizer(wrap(labelled), state=rpx.Moments8bit()), rpx.optimizer(wrap(labelled))

    @jax.jit
    def two(w, grads):
        found = []
        for each in (tx, plain):
            state = each.init(w)
            for _ in range(2):
                updates, state = each.update(grads, state, w)
            found.append(updates["w"])
        return found, state

    (got, want), _ = two(w, grads)
    assert np.any(np.asarray(want))
    assert np.all(np.abs(got) <= 1.7 * np.abs(want))  # small second moments are rounded up
    assert np.mean(np.abs(got - want)) < 0.05 * np.mean(np.abs(want))
