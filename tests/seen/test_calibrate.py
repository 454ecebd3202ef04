"""Arrays that start one group after the other, against loops by hand in float64."""

import functools
import itertools
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import reparax as rpx

L, D, H = 3, 8, 16
RNG = np.random.default_rng(147)  # no number to be rounded lies within 0.0026 of half a step
MIXED = RNG.normal(size=(D, D)) * np.exp(RNG.normal(size=D) / 2)
BATCHES = [(RNG.normal(size=(16, D)) @ MIXED / 3).astype(np.float32) for _ in range(3)]
GATE, UP = (RNG.normal(size=(L, D, H)).astype(np.float32) / 3 for _ in range(2))
DOWN = RNG.normal(size=(L, H, D)).astype(np.float32) / 3
PARAMS = {"layers": {"gate": GATE, "up": UP, "down": DOWN}, "head": RNG.normal(size=(D, D)).astype(np.float32)}
GPTQ = rpx.Stored("int4", block=4, fit="gptq", where="layers/(gate|up|down)", stacked=0)
BOTH = rpx.Chain((GPTQ, rpx.Stored("int4", block=4, fit="gptq", where="head")))


def layer(x, w):
    return x + (jnp.tanh(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None


def loss(params, x):
    return jnp.mean((jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]) ** 2)


def arrays(tree):
    return jax.tree.map(jnp.asarray, tree)


def gptq(w, x):
    """GPTQ by the whole inverse, in blocks of four inputs with scales of their own, in float64."""
    w, moments = w.astype(np.float64).copy(), x.T @ x / len(x)
    inverse = np.linalg.inv(moments + 0.01 * np.mean(np.diag(moments)) * np.eye(len(w)))
    rounded = np.zeros_like(w)
    for k in range(len(w)):
        if k % 4 == 0:
            scale = np.max(np.abs(w[k : k + 4]), axis=0) / 7
        rounded[k] = np.clip(np.round(w[k] / scale), -8, 7) * scale
        w[k + 1 :] -= np.outer(inverse[k + 1 :, k], (w[k] - rounded[k]) / inverse[k, k])
        inverse = inverse - np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return rounded


@functools.cache
def by_hand():
    """Gate and up, then down, layer after layer, and the head at the end, in a network that is compressed so far."""
    x, found = np.concatenate(BATCHES).astype(np.float64), {"gate": [], "up": [], "down": []}
    for i in range(L):
        gate, up = gptq(GATE[i], x), gptq(UP[i], x)
        hidden = np.tanh(x @ gate) * (x @ up)
        down = gptq(DOWN[i], hidden)
        x = x + hidden @ down
        for name, w in {"gate": gate, "up": up, "down": down}.items():
            found[name].append(w)
    return {"layers": {name: np.stack(each) for name, each in found.items()}, "head": gptq(PARAMS["head"], x)}


@functools.cache
def scanned():
    raw = rpx.calibrate(BOTH, loss, arrays(PARAMS), BATCHES)
    return raw, BOTH.fold(raw)


def assert_equal(got, want):
    for name, x in want["layers"].items():
        np.testing.assert_allclose(got["layers"][name], x, atol=2e-5)
    np.testing.assert_allclose(got["head"], want["head"], atol=2e-5)


def test_layers_of_a_scan_are_the_loop_by_hand():
    raw, got = scanned()
    BOTH.check(raw, arrays(PARAMS))
    assert_equal(got, by_hand())
    at_once = BOTH.fold(BOTH.init(arrays(PARAMS), seen=rpx.inputs(loss)(arrays(PARAMS), np.concatenate(BATCHES))))
    assert np.max(np.abs(at_once["layers"]["down"][2] - by_hand()["layers"]["down"][2])) > 0.05


@pytest.mark.thorough
def test_layers_written_one_by_one_are_the_loop_by_hand():
    layers = [{name: x[i] for name, x in PARAMS["layers"].items()} for i in range(2)]

    def plain(params, x):
        for w in params["layers"]:
            x, _ = layer(x, w)
        return jnp.mean(x**2)

    p = rpx.Stored("int4", block=4, fit="gptq")
    got = p.fold(rpx.calibrate(p, plain, arrays({"layers": layers}), BATCHES))["layers"]
    for i, name in itertools.product(range(2), layers[0]):
        np.testing.assert_allclose(got[i][name], by_hand()["layers"][name][i], atol=2e-5)


class Killed(Exception):
    pass


class Passes:
    """Batches, of which passes are counted; the process is killed in one of them."""

    def __init__(self, killed_in=None):
        self.count, self.killed_in = 0, killed_in

    def __call__(self):
        self.count += 1
        for batch in BATCHES:
            yield batch
            if self.count == self.killed_in:
                raise Killed


def test_what_was_stopped_goes_on(tmp_path):
    params, passes = arrays(PARAMS), Passes()
    with pytest.raises(Killed):
        rpx.calibrate(BOTH, loss, params, Passes(killed_in=5), folder=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["00000.npz", "00001.npz", "00002.npz", "calibration.json"]
    got = BOTH.fold(rpx.calibrate(BOTH, loss, params, passes, folder=str(tmp_path)))
    assert_equal(got, by_hand())
    assert passes.count == 1 + 4  # the first batch tells the order; three of seven groups were done
    other = {**params, "head": params["head"] + 1}
    with raises(
        ValueError,
        f"calibrate(loss) got folder={str(tmp_path)!r}, which holds a calibration with params other than these. Give "
        f"another folder, or the same arguments.",
    ):
        rpx.calibrate(BOTH, loss, other, BATCHES, folder=tmp_path)


@pytest.mark.thorough
def test_batches_over_eight_devices_are_summed():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("data"), P()))
    split = [jax.device_put(batch, rows) for batch in BATCHES]
    raw = rpx.calibrate(BOTH, loss, jax.device_put(PARAMS, whole), split)
    assert_equal(BOTH.fold(raw), by_hand())


@pytest.mark.thorough
def test_the_moments_of_one_layer_are_in_memory():
    wide, deep = 64, 16
    w = jnp.asarray(RNG.normal(size=(deep, wide, wide)) / 8, jnp.float32)
    rows = [np.asarray(RNG.normal(size=(8, wide)), np.float32) for _ in range(2)]
    p = rpx.MagnitudePrune(0.5, fit="sparsegpt", stacked=0)

    def loss(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]

    def run(*, donate):
        params, most = {"w": jnp.copy(w)}, []
        before = sum(x.nbytes for x in jax.live_arrays())

        def batches():
            for each in rows:
                yield each
                most.append(sum(x.nbytes for x in jax.live_arrays()) - before)

        raw = rpx.calibrate(p, loss, params, batches, donate=donate)
        assert params["w"].is_deleted() == donate
        return max(most), jax.tree.map(np.asarray, raw)

    (most, raw), (less, same) = run(donate=False), run(donate=True)
    assert most < 4 * w.nbytes  # weights and masks, what the network reads, and moments of one layer
    assert less < most - 0.9 * w.nbytes
    jax.tree.map(np.testing.assert_array_equal, raw, same)


def test_an_array_with_two_paths_is_not_overwritten():
    p, twice = rpx.MagnitudePrune(0.5, fit="wanda", where="layers/.*", stacked=0), jnp.asarray(UP)
    params = {"layers": {"gate": twice, "up": twice, "down": jnp.asarray(DOWN)}, "head": arrays(PARAMS["head"])}
    want = rpx.calibrate(p, loss, jax.tree.map(jnp.copy, params), BATCHES[:1])
    got = rpx.calibrate(p, loss, params, BATCHES[:1], donate=True)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert [x.is_deleted() for x in (twice, params["layers"]["down"])] == [False, True]


@pytest.mark.thorough
def test_steps_in_reverse_start_with_the_last():
    def backwards(params, x):
        return jnp.mean(jax.lax.scan(layer, x, params["layers"], reverse=True)[0])

    turned = {"layers": {name: x[::-1] for name, x in PARAMS["layers"].items()}}
    got = GPTQ.fold(rpx.calibrate(GPTQ, backwards, arrays(turned), BATCHES))
    for name, x in by_hand()["layers"].items():
        np.testing.assert_allclose(got["layers"][name][::-1], x, atol=2e-5)


def test_other_groups_by_where():
    """All of a layer at once, from its inputs as they were before any of it was rounded."""
    x, want = np.concatenate(BATCHES).astype(np.float64), []
    for i in range(L):
        hidden = np.tanh(x @ GATE[i]) * (x @ UP[i])
        want.append(gptq(DOWN[i], hidden))
        x = x + (np.tanh(x @ gptq(GATE[i], x)) * (x @ gptq(UP[i], x))) @ want[-1]
    raw = rpx.calibrate(GPTQ, loss, arrays(PARAMS), BATCHES, where="layers/.*")
    np.testing.assert_allclose(GPTQ.fold(raw)["layers"]["down"], np.stack(want), atol=2e-5)


def corrected(w, x, before, share):
    """Weights that make up for a share of what their inputs lack, in float64."""
    moments = x.T @ x
    damped = moments + 0.01 * np.mean(np.diag(moments)) * np.eye(len(w))
    return w + share * np.linalg.inv(damped) @ (x.T @ (before - x)) @ w


@pytest.mark.parametrize("share", [1.0, pytest.param(0.5, marks=pytest.mark.thorough)])
def test_errors_of_earlier_layers_are_made_up_for(share):
    x = before = np.concatenate(BATCHES).astype(np.float64)
    for i in range(2):
        gate, up = (gptq(corrected(w[i], x, before, share), x) for w in (GATE, UP))
        now, then = np.tanh(x @ gate) * (x @ up), np.tanh(before @ GATE[i]) * (before @ UP[i])
        down = gptq(corrected(DOWN[i], now, then, share), now)
        x, before = x + now @ down, before + then @ DOWN[i]
    params = arrays({"layers": jax.tree.map(lambda x: x[:2], PARAMS["layers"]), "head": PARAMS["head"]})
    raw = rpx.calibrate(GPTQ, loss, params, BATCHES, error_propagation=share)
    np.testing.assert_allclose(GPTQ.fold(raw)["layers"]["down"][1], down, atol=1e-4)


def test_stages_without_second_moments_start_as_they_are():
    p = rpx.LoRA(2, start="lora_ga", where="layers/up", stacked=0)
    plain, moved = (
        rpx.calibrate(p, loss, arrays(PARAMS), BATCHES[:1], jax.random.key(0), error_propagation=share)
        for share in (0.0, 1.0)
    )
    jax.tree.map(np.testing.assert_array_equal, plain, moved)


def test_shares_are_from_zero_to_one_of_a_network_that_is_kept():
    with raises(ValueError, "calibrate(loss) got error_propagation=1.5, but takes a share from 0 to 1."):
        rpx.calibrate(BOTH, loss, arrays(PARAMS), BATCHES, error_propagation=1.5)
    with raises(
        ValueError,
        "calibrate(loss) got donate=True with error_propagation=0.5, which compares with the network of the original "
        "params. Leave one of them out.",
    ):
        rpx.calibrate(BOTH, loss, arrays(PARAMS), BATCHES, error_propagation=0.5, donate=True)
    params = arrays(PARAMS)
    with pytest.raises(TypeError, match="donate"):
        rpx.calibrate(BOTH, loss, params, BATCHES, donate="no")
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_experts_have_no_rows_that_two_networks_share():
    def routed(params, x):
        x = jnp.tanh(x @ params["first"]) @ params["first"]
        sizes = jnp.sum(jax.nn.one_hot(jnp.where(x[:, 0] > 0, 1, 0), 2, dtype=jnp.int32), axis=0)
        return jnp.mean(jax.lax.ragged_dot(x, params["w"], sizes))

    params = {"first": arrays(PARAMS["head"]), "w": jnp.ones((2, D, 4))}
    with raises(
        ValueError,
        "rpx.calibrate got error_propagation for an array whose rows of data are grouped, such as experts, because "
        "errors of the network may change the groups. Leave error_propagation out.",
    ):
        p = rpx.Chain((rpx.Stored("int4", where="first"), rpx.Stored("int8", axis=(0, 2), fit="gptq", where="w")))
        rpx.calibrate(p, routed, params, BATCHES[:1], error_propagation=0.5)


def test_starts_that_draw_draw_for_each_layer():
    p = rpx.LoRA(2, where="layers/.*", stacked=0)
    raw = rpx.calibrate(p, loss, arrays(PARAMS), BATCHES, jax.random.key(0))
    p.check(raw, arrays(PARAMS))
    a = raw["layers"]["up"]["@lora"]["a"]
    assert len({float(x) for x in a[:, 0, 0]}) == L
    np.testing.assert_array_equal(p.fold(raw)["layers"]["up"], UP)


def test_starts_of_steps_draw_each_from_a_key_of_its_own():
    lora = rpx.LoRA(2, where="layers/up", stacked=0)
    p = lora >> rpx.MagnitudePrune(0.5, axis="each", fit="wanda", where="layers/up", stacked=0)
    raw = rpx.calibrate(p, loss, arrays(PARAMS), BATCHES[:1], jax.random.key(0))
    a = raw["layers"]["up"]["@magnitude_prune"]["w"]["@lora"]["a"]
    assert len({float(x) for x in a[:, 0, 0]}) == L


def test_largest_magnitudes_are_collected_where_a_stage_needs_them():
    def scaled(params, x):
        return jnp.sum((x * params["scale"][None]) @ params["head"])

    params = {"scale": jnp.ones(D), "head": jnp.asarray(PARAMS["head"])}
    p = rpx.quantized.Smooth({"scale": "scale", "w": "head"})
    sizes, weights = np.max(np.abs(np.concatenate(BATCHES)), axis=0), np.max(np.abs(PARAMS["head"]), axis=1)
    np.testing.assert_allclose(
        p.fold(rpx.calibrate(p, scaled, params, BATCHES))["scale"], np.sqrt(weights / sizes), rtol=1e-5
    )


@pytest.mark.thorough
def test_gradients_are_collected_where_a_stage_needs_them():
    p = rpx.LoRA(2, start="lora_ga", where="layers/up", stacked=0)
    got = rpx.calibrate(p, loss, arrays(PARAMS), [np.concatenate(BATCHES)], jax.random.key(0))["layers"]["up"]["@lora"]
    want = p.init(
        arrays(PARAMS),
        jax.random.key(0),
        seen=rpx.inputs(loss, moments="diagonal", gradients=True)(arrays(PARAMS), np.concatenate(BATCHES)),
    )["layers"]["up"]["@lora"]
    np.testing.assert_allclose(got["a"] @ got["b"], want["a"] @ want["b"], atol=1e-4)


def test_a_terminal_shows_how_many_groups_are_done(monkeypatch, capsys):
    p = rpx.MagnitudePrune(0.5, fit="wanda", where="layers/up", stacked=0)
    rpx.calibrate(p, loss, arrays(PARAMS), BATCHES[:1])
    assert not capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    rpx.calibrate(p, loss, arrays(PARAMS), BATCHES[:1])
    shown = capsys.readouterr().err
    assert "calibrate" in shown
    assert f"{L}/{L}" in shown


USED_UP = (
    "calibrate(loss) passes over the batches several times, but got the same iterator for two passes, of type "
    "list_iterator. Pass a list, or a function that returns a new iterator: `lambda: ...`."
)
SHORTER = iter([BATCHES, BATCHES, BATCHES[:2]])


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        (iter(BATCHES), USED_UP),
        (functools.partial(lambda x: x, iter(BATCHES)), USED_UP),
        (lambda: next(SHORTER), "calibrate(loss) got 2 batches in a pass, and 3 before. Pass the same ones each time."),
        (
            lambda: filter(None, [None]),
            "calibrate(loss) got no batch in a pass over the batches. Pass at least one.",
        ),
    ],
    ids=["an iterator", "one from a function", "fewer in the second pass", "none"],
)
def test_batches_that_are_used_up_are_refused(batches, text):
    with raises(ValueError, text):
        rpx.calibrate(BOTH, loss, arrays(PARAMS), batches)


def test_what_cannot_start_step_by_step_is_refused():
    with raises(
        ValueError,
        "calibrate(loss): MagnitudePrune(sparsity=0.5, fit='wanda', where='layers/up') starts all indices of axis 0 of "
        "'layers/up' together, but a scan reads one after the other, and each should correct the errors of those "
        "before. Write `stacked=0` in that stage.",
    ):
        rpx.calibrate(rpx.MagnitudePrune(0.5, fit="wanda", where="layers/up"), loss, arrays(PARAMS), BATCHES)
    with raises(
        ValueError,
        "calibrate(loss): 'layers/up/@stored/@fixed/scale' has shape (1, 1, 1) for all steps of a scan and (1, 1, 1) "
        "for one, so steps cannot start one after the other. Write the axis that the scan slices as `stacked` in the "
        "stage that makes it.",
    ):
        mixed = rpx.Chain(
            (rpx.Stored("int8", where="layers/up"), rpx.Stored("int4", block=4, fit="gptq", where="head"))
        )
        rpx.calibrate(mixed, loss, arrays(PARAMS), BATCHES)
    with raises(
        ValueError,
        "calibrate(loss) got where with 'haed', which fits no array that the parametrization acts on: these are "
        "'head', 'layers/down', 'layers/gate'. Correct it, or leave it out.",
    ):
        rpx.calibrate(BOTH, loss, arrays(PARAMS), BATCHES, where=["head", "haed"])
    with raises(
        ValueError,
        "calibrate(<lambda>) takes a loss of the effective tree, but this one calls `apply`. Pass a loss that reads "
        "its weights as they are: `loss(p.apply(raw), batch)` is for training.",
    ):
        rpx.calibrate(BOTH, lambda w, x: loss(rpx.Chain().apply(w), x), arrays(PARAMS), BATCHES)
    with raises(
        ValueError,
        "calibrate(<lambda>): a stage joins 'layers/gate' with 'head', but no one scan slices both, so they cannot "
        "start at the same step of it. Leave one of them out with the `where` of that stage.",
    ):
        params = arrays({**PARAMS, "head": UP})
        tied = rpx.Chain((GPTQ, rpx.Tie({"head": "layers/gate"})))
        rpx.calibrate(tied, lambda w, x: loss({**w, "head": w["head"][0]}, x), params, BATCHES)


@pytest.mark.thorough
def test_boxes_of_linen_stay_around_each_value():
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("rows", "columns"))
    net = nn.Sequential([nn.Dense(8, kernel_init=kernel), jnp.tanh, nn.Dense(4, kernel_init=kernel)])
    params = net.init(jax.random.key(0), BATCHES[0])
    p = rpx.Stored("int4", block=4, fit="gptq")

    def boxed(params, x):
        return jnp.mean(net.apply(params, x))

    got = rpx.calibrate(p, boxed, params, BATCHES)
    want = p.init(params, seen=rpx.inputs(boxed)(params, np.concatenate(BATCHES)))
    assert jax.tree.structure(got) == jax.tree.structure(want)
