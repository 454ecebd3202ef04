"""RETURNN's torch backend beside ours, live: a model that it trained, there and back; its noise and its dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import reparax as rpx

pytestmark = pytest.mark.filterwarnings("ignore")
torch = pytest.importorskip("torch")
rf = pytest.importorskip("returnn.frontend")
from returnn.tensor import Dim, Tensor  # noqa: E402

FEATURES, HIDDEN, WORDS = Dim(6, name="features"), Dim(8, name="hidden"), Dim(5, name="words")
BATCH, TIME = Dim(3, name="batch"), Dim(7, name="time")
X = np.random.default_rng(0).normal(size=(3, 7, 6)).astype(np.float32)


class Theirs(rf.Module):
    """A layer, an LSTM and scores."""

    def __init__(self):
        super().__init__()
        self.first, self.lstm, self.last = (
            rf.Linear(FEATURES, HIDDEN),
            rf.LSTM(HIDDEN, HIDDEN),
            rf.Linear(HIDDEN, WORDS),
        )

    def __call__(self, x):
        start = self.lstm.default_initial_state(batch_dims=[BATCH])
        h, _ = self.lstm(rf.relu(self.first(x)), spatial_dim=TIME, state=start)
        return self.last(h)


class Ours(nn.Module):
    """The same in linen."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, name="first")(x))
        return nn.Dense(5, name="last")(nn.RNN(nn.OptimizedLSTMCell(8), name="lstm")(x))


@pytest.fixture(scope="module")
def trained():
    """What RETURNN has after some steps, and its outputs."""
    rf.select_backend_torch()
    rf.set_random_seed(1)
    model, x = Theirs(), Tensor("x", dims=[BATCH, TIME, FEATURES], dtype="float32")
    x.raw_tensor = torch.tensor(X)
    parameters = [p.raw_tensor for _, p in model.named_parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).raw_tensor.square().mean().backward()
        optimizer.step()
    return model, x, outputs(model, x)


def outputs(model, x):
    return model(x).copy_transpose([BATCH, TIME, WORDS]).raw_tensor.detach().numpy()


def state_dict(model):
    return {name: p.raw_tensor.detach().numpy().copy() for name, p in model.named_parameters()}


LAYOUTS = {"lstm/.*weight": "same", ".*weight": "conv1d"}  # RETURNN's linear layers have (in, out)


def read(state):
    """The parameters of ``Ours``."""
    like: dict[str, dict[str, np.ndarray]] = {}
    for name, x in state.items():
        module, _, part = name.rpartition(".")
        like.setdefault(module, {})[part] = x
    params = rpx.io.from_torch(rpx.Chain(), state, like, layouts=LAYOUTS)
    cell = rpx.shared.convert(params["lstm"], "returnn.lstm", "flax.lstm")
    dense = {name: {"kernel": params[name]["weight"], "bias": params[name]["bias"]} for name in ("first", "last")}
    return dense | {"OptimizedLSTMCell_0": cell}


def written(params):
    """The state dict of ``Theirs``."""
    cell = rpx.shared.convert(params["OptimizedLSTMCell_0"], "flax.lstm", "returnn.lstm")
    dense = {name: {"weight": params[name]["kernel"], "bias": params[name]["bias"]} for name in ("first", "last")}
    return rpx.io.to_torch(rpx.Chain(), dense | {"lstm": cell}, layouts=LAYOUTS)


def test_a_model_that_returnn_trained_computes_the_same_here_and_after_training_here_there(trained):
    model, x, expected = trained
    params = read(state_dict(model))
    apply = jax.jit(lambda params: Ours().apply({"params": params}, X))
    np.testing.assert_allclose(apply(params), expected, atol=1e-5)

    p = rpx.VarNoise(0.05)

    def loss(params, key):
        return jnp.mean(apply(p.apply(params, key)) ** 2)

    for key in jax.random.split(jax.random.key(0), 3):
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, key))
    state = written(params)
    assert state.keys() == state_dict(model).keys()
    for name, parameter in model.named_parameters():
        parameter.raw_tensor.data = torch.tensor(state[name])
    np.testing.assert_allclose(outputs(model, x), apply(params), atol=1e-5)


def theirs(change, n):
    """Draws of a weight of RETURNN under a change."""
    layer = rf.Linear(Dim(20, name="in"), Dim(30, name="out"))
    layer.weight.raw_tensor.data = torch.tensor(WEIGHT)
    change(layer)
    with rf.get_run_ctx().train_flag_ctx(train_flag=True):
        return np.stack([layer.weight.copy_transpose(layer.weight.dims).raw_tensor.detach().numpy() for _ in range(n)])


WEIGHT = np.random.default_rng(1).normal(size=(20, 30)).astype(np.float32)


@pytest.mark.parametrize(
    ("change", "p"),
    [
        (lambda layer: rf.weight_noise(layer, "weight", std=0.075), rpx.VarNoise(0.075)),
        (lambda layer: rf.weight_dropout(layer, "weight", drop_prob=0.3), rpx.WeightDropout(0.3)),
    ],
    ids=["noise", "dropout"],
)
def test_noise_and_dropout_have_the_mean_and_the_variance_of_returnn(change, p):
    rf.select_backend_torch()
    rf.set_random_seed(2)
    rf.init_train_step_run_ctx(train_flag=True)
    n = 400
    there = theirs(change, n)
    here = jax.vmap(lambda key: p.apply({"kernel": jnp.asarray(WEIGHT)}, key)["kernel"])(
        jax.random.split(jax.random.key(0), n)
    )
    for draws in (there, np.asarray(here)):
        np.testing.assert_allclose(draws.mean(), WEIGHT.mean(), atol=4 * draws.std() / draws.size**0.5)
    variances = [((draws - WEIGHT) ** 2).mean() for draws in (there, np.asarray(here))]
    spread = np.std((np.asarray(here) - WEIGHT) ** 2) / here.size**0.5
    assert abs(variances[0] - variances[1]) < 4 * 2**0.5 * spread


def test_the_recognizer_whose_costs_are_compared_is_ours():
    from examples.speech import costs, in_returnn
    from examples.speech.model import Recognizer

    there, ours = in_returnn.InReturnn(10), costs.example(Recognizer(words=10), 1)[0]
    n = sum(parameter.raw_tensor.numel() for parameter in there.parameters())
    assert n == sum(w.size for w in jax.tree.leaves(ours))
    for way in in_returnn.WAYS:
        loss, gradient = in_returnn.step_of(way, 10)
        grads = gradient(loss())
        assert sum(g.numel() for g in grads) == n
        found = in_returnn.memory(loss, gradient)
        assert found["temporary MiB"] > found["kept MiB"] > 0
