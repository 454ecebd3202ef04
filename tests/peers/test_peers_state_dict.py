"""State dicts of torch itself: read into our raw trees, trained on both sides, and written back for a strict load.

Skipped where torch is missing; `pip install torch==2.13.0` (the extra `peers`) brings it.
"""

import copy
import functools
import warnings
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from flax import nnx

import reparax as rpx

torch = pytest.importorskip("torch")
parametrizations = pytest.importorskip("torch.nn.utils.parametrizations")
prune = pytest.importorskip("torch.nn.utils.prune")


class Case(NamedTuple):
    """A module of torch, and the stages that it is parametrized by.

    Attributes:
      module: The module, plain.
      parametrize: What makes of it a parametrized one.
      stages: Ours, on the path that they get.
      back: Our axes in the order of torch.
      layout: What ours is called, where it is not the default.
      flipped: Whether the kernel stands the other way round.
    """

    module: Any
    parametrize: Any
    stages: Any
    back: tuple[int, ...] = (1, 0)
    layout: str | None = None
    flipped: bool = False

    @property
    def name(self) -> str:
        return "embedding" if isinstance(self.module, torch.nn.Embedding) else "kernel"


def linear(rows=4, columns=3):
    return torch.nn.Linear(columns, rows)


def conv():
    return torch.nn.Conv2d(3, 4, (2, 5))


def deconv():
    return torch.nn.ConvTranspose2d(3, 4, (2, 5))


def old(hook, **options):
    """A hook that torch calls deprecated."""

    def parametrize(module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return hook(module, **options)

    return parametrize


def pruned(module, name="weight"):
    prune.l1_unstructured(module, name, 0.2)


def pruned_direction(module):
    pruned(parametrizations.weight_norm(module).parametrizations.weight, "original1")


def spectral_direction(module):
    parametrizations.spectral_norm(parametrizations.weight_norm(module).parametrizations.weight, "original1")


def both(module):
    parametrizations.spectral_norm(parametrizations.weight_norm(module))


def orthogonal(map, **options):
    return partial(parametrizations.orthogonal, orthogonal_map=map, **options)


def norm(axis):
    return lambda where: rpx.WeightNorm(axis=axis, where=where)


def spectral(axis):
    return lambda where: rpx.SpectralNorm(columns=axis, where=where)


def matrix(map):
    return lambda where: rpx.Orthogonal(map, where=where)


def mask(where):
    return rpx.Mask(where=where)


def freeze(where):
    return rpx.Freeze(where=where)


CONV, DECONV = (3, 2, 0, 1), (2, 3, 0, 1)
WEIGHT_NORM, SPECTRAL_NORM = parametrizations.weight_norm, parametrizations.spectral_norm

LISTED = {
    "rows": Case(linear(), WEIGHT_NORM, norm(-1)),
    "columns": Case(linear(), partial(WEIGHT_NORM, dim=1), norm(0)),
    "whole": Case(linear(), partial(WEIGHT_NORM, dim=None), norm(None)),
    "conv": Case(conv(), WEIGHT_NORM, norm(-1), CONV),
    "deconv": Case(deconv(), WEIGHT_NORM, norm(-2), DECONV, "conv_transpose", flipped=True),
    "deconv of flax": Case(deconv(), WEIGHT_NORM, norm(-1), CONV),
    "embedding": Case(torch.nn.Embedding(4, 3), WEIGHT_NORM, norm(0), (0, 1)),
    "spectral": Case(linear(), SPECTRAL_NORM, spectral(-1)),
    "spectral conv": Case(conv(), SPECTRAL_NORM, spectral(-1), CONV),
    "spectral deconv": Case(deconv(), SPECTRAL_NORM, spectral(-1), DECONV, "conv_transpose", flipped=True),
    "spectral deconv of flax": Case(deconv(), SPECTRAL_NORM, spectral(-2), CONV),
    "both": Case(linear(), both, lambda where: norm(-1)(where) >> spectral(-1)(where)),
    "spectral direction": Case(linear(), spectral_direction, lambda where: spectral(-1)(where) >> norm(-1)(where)),
    "tall expm": Case(linear(5, 2), orthogonal("matrix_exp"), matrix("expm")),
    "wide cayley": Case(linear(2, 5), orthogonal("cayley"), matrix("cayley")),
    "tall householder": Case(linear(5, 2), orthogonal("householder"), matrix("householder")),
    "square householder": Case(linear(3, 3), orthogonal("householder"), matrix("householder"), (0, 1), "same"),
    "turned householder": Case(linear(3, 3), orthogonal("householder"), matrix("householder")),
    "masked": Case(linear(), pruned, mask),
    "masked conv": Case(conv(), pruned, mask, CONV),
    "masked direction": Case(linear(), pruned_direction, lambda where: mask(where) >> norm(-1)(where)),
    "frozen": Case(linear(), lambda module: module.weight.requires_grad_(requires_grad=False), freeze),
    "plain": Case(linear(), lambda module: None, lambda where: rpx.VarNoise(0.1, where=where)),
}
HOOKED = {
    "rows": Case(linear(), old(torch.nn.utils.weight_norm), norm(-1)),
    "whole": Case(linear(), old(torch.nn.utils.weight_norm, dim=None), norm(None)),
    "conv": Case(conv(), old(torch.nn.utils.weight_norm), norm(-1), CONV),
    "spectral": Case(linear(), old(torch.nn.utils.spectral_norm), spectral(-1)),
    "spectral deconv": Case(deconv(), old(torch.nn.utils.spectral_norm), spectral(-2), CONV),
    "masked": Case(linear(), pruned, mask),
}
STYLES = {"parametrizations": LISTED, "hooks": HOOKED}


def built(cases):
    """Torch's modules in double precision, parametrized."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: copy.deepcopy(case.module) for name, case in cases.items()}).double()
    for name, case in cases.items():
        case.parametrize(model[name])
    return model


def moved(cases):
    """The modules away from where they started."""
    model = built(cases)
    with torch.no_grad():
        for name, x in model.named_parameters():
            signs = torch.eye(*x.shape, dtype=x.dtype) if "householder.param" in name else 0  # not to be moved
            x.add_(0.3 * torch.randn_like(x) * (1 - signs))
    return model


def weights(model):
    """The weight of each module, as a forward pass computes it."""
    for module in model.values():
        for hook in module._forward_pre_hooks.values():
            hook(module, None)
    return {name: module.weight for name, module in model.items()}


def ours(case, x):
    """An array of torch in our layout, by numpy alone."""
    x = x.detach().numpy()
    x = x[..., ::-1, ::-1] if case.flipped else x
    return x.transpose(np.argsort(case.back))


def loss_of_torch(model, targets):
    return sum(torch.sum((w - targets[name]) ** 2) for name, w in weights(model).items())


@functools.partial(jax.jit, static_argnums=(0, 1))
def trained(p, kernels, raw, targets):
    """The raw tree after one step of gradient descent as in training, and the weights before and after."""

    def loss(free):
        effective = p.fold(rpx.combine(free, fixed))
        return sum(jnp.sum((effective[name][kernel] - targets[name]) ** 2) for name, kernel in kernels)

    free, fixed = rpx.partition(p.update(raw))
    stepped = rpx.combine(jax.tree.map(lambda x, dx: x - 0.1 * dx, free, jax.grad(loss)(free)), fixed)
    both = jax.tree.map(lambda *xs: jnp.stack(xs), raw, stepped)
    return stepped, jax.lax.map(p.fold, both)


class Exchange(NamedTuple):
    """What both sides have before and after a step, and what goes back."""

    before: dict[str, Any]
    after: dict[str, Any]
    loaded: dict[str, Any]
    state: Any
    returned: Any


@functools.cache
def exchanged(style):
    cases, model = STYLES[style], moved(STYLES[style])
    if style == "hooks":  # which iterate v before u: no matter, where they have converged
        for _ in range(300):
            weights(model)
    before = {name: x.detach().clone() for name, x in weights(model.eval()).items()}
    state = {name: x.detach().clone() for name, x in model.state_dict().items()}
    targets = {name: torch.randn_like(x) for name, x in before.items()}
    like = {name: {case.name: ours(case, before[name])} for name, case in cases.items()}
    for name, module in model.items():
        if getattr(module, "bias", None) is not None:
            like[name]["bias"] = module.bias.detach().numpy()
    p = rpx.Chain(tuple(case.stages(f"{name}/{case.name}") for name, case in cases.items()))
    layouts = {f"{name}/.*": case.layout for name, case in cases.items() if case.layout}
    convolutions = {f"{name}/.*": "kernel" for name, case in cases.items() if len(case.back) > 2}
    maps = {
        f"{name}/{case.name}": case.parametrize.keywords["orthogonal_map"]
        for name, case in cases.items()
        if "orthogonal_map" in getattr(case.parametrize, "keywords", {})
    }
    with jax.enable_x64():
        raw = rpx.io.from_torch(p, model.state_dict(), like, layouts=layouts, orthogonal_map=maps)
        returned = rpx.io.to_torch(p, raw, layouts=convolutions | layouts, orthogonal_map=maps, style=style)
        kernels = tuple((name, case.name) for name, case in cases.items())
        stepped, effective = trained(p, kernels, raw, {name: ours(cases[name], x) for name, x in targets.items()})
        written = rpx.io.to_torch(p, stepped, layouts=convolutions | layouts, orthogonal_map=maps, style=style)
    loss_of_torch(model.train(), targets).backward()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.requires_grad and not name.endswith("bias"):
                x.sub_(0.1 * x.grad)
    fresh = built(cases).eval()
    fresh.load_state_dict({name: torch.from_numpy(x) for name, x in written.items()}, strict=True)
    found = {name: effective[name][case.name] for name, case in cases.items()}
    return Exchange(
        {name: (w[0], before[name]) for name, w in found.items()},
        {name: (found[name][1], w) for name, w in weights(model.eval()).items()},
        {name: (found[name][1], w) for name, w in weights(fresh).items()},
        state,
        returned,
    )


def of_cases(*without):
    """A test for each module but those whose names hold one of these words."""
    names = [(style, name) for style, cases in STYLES.items() for name in cases]
    return pytest.mark.parametrize(
        ("style", "name"), [each for each in names if not any(word in each[1] for word in without)]
    )


def assert_equal(style, name, pair):
    got, want = pair
    np.testing.assert_allclose(got, ours(STYLES[style][name], want), rtol=0, atol=1e-10)


@of_cases()
def test_a_state_dict_gives_the_weights_of_torch(style, name):
    assert_equal(style, name, exchanged(style).before[name])


@of_cases("expm", "cayley", "turned householder")
def test_one_step_of_gradient_descent_gives_the_weights_of_torch(style, name):
    assert_equal(style, name, exchanged(style).after[name])


@of_cases()
def test_what_we_have_trained_loads_strictly_into_torch(style, name):
    assert_equal(style, name, exchanged(style).loaded[name])


# Orthogonal matrices have other coordinates: the same weights, but only reflections take the same steps.
@of_cases("expm", "cayley", "householder")
def test_there_and_back_gives_the_same_numbers(style, name):
    state, returned = exchanged(style).state, exchanged(style).returned
    assert returned.keys() == state.keys()
    for each in [each for each in state if each.startswith(f"{name}.")]:
        np.testing.assert_array_equal(returned[each], state[each].numpy())


def test_the_layouts_give_the_convolutions_of_torch():
    x, kernel = np.random.default_rng(0).standard_normal((1, 6, 7, 3)), np.zeros((2, 5, 3, 4))
    kernels = {"conv": kernel, "deconv": kernel, "deconv of flax": np.zeros((2, 5, 4, 3))}
    like = {name: {"kernel": w, "bias": np.zeros(4)} for name, w in kernels.items()}
    model = torch.nn.ModuleDict({"conv": conv(), "deconv": deconv(), "deconv of flax": deconv()}).double()
    axes, valid = ("NHWC", "HWIO", "NHWC"), {"strides": (1, 1), "padding": "VALID"}
    with jax.enable_x64():
        got = rpx.io.from_torch(rpx.Chain(), model.state_dict(), like, layouts={"deconv/kernel": "conv_transpose"})
        transposed = partial(jax.lax.conv_transpose, x, dimension_numbers=axes, **valid)
        outputs = {
            "conv": jax.lax.conv_general_dilated(x, got["conv"]["kernel"], (1, 1), "VALID", dimension_numbers=axes),
            "deconv": transposed(got["deconv"]["kernel"]),
            "deconv of flax": transposed(got["deconv of flax"]["kernel"], transpose_kernel=True),
        }
        outputs = {name: np.asarray(y) + np.asarray(got[name]["bias"]) for name, y in outputs.items()}
    for name, y in outputs.items():
        want = model[name](torch.tensor(x.transpose(0, 3, 1, 2))).detach().numpy()
        np.testing.assert_allclose(y.transpose(0, 3, 1, 2), want, rtol=0, atol=1e-10)


def test_tensors_are_copied_and_keep_half_precision():
    module = torch.nn.Linear(2, 3).bfloat16()
    like = {"kernel": jnp.zeros((2, 3), jnp.bfloat16), "bias": jnp.zeros(3, jnp.bfloat16)}
    got = rpx.io.from_torch(rpx.Chain(), module.state_dict(), like)
    want = module.weight.detach().float().numpy().T
    with torch.no_grad():
        module.weight.zero_()
    np.testing.assert_array_equal(got["kernel"].astype(jnp.float32), want)


def test_the_classes_of_modules_give_the_transposed_convolutions_of_torch():
    torch.manual_seed(0)
    module, x = torch.nn.ConvTranspose1d(6, 6, 4, bias=False), np.random.default_rng(0).normal(size=(1, 6, 9))
    x = x.astype(np.float32)
    want, channels_last = module(torch.tensor(x)).detach().numpy(), jnp.asarray(x.transpose(0, 2, 1))
    for transposed in (False, True):
        options = {"padding": "VALID", "use_bias": False, "transpose_kernel": transposed}
        like = nnx.ConvTranspose(6, 6, (4,), rngs=nnx.Rngs(0), **options)
        read = rpx.io.from_torch(rpx.Chain(), module.state_dict(), like)
        np.testing.assert_allclose(read(channels_last).transpose(0, 2, 1), want, rtol=0, atol=1e-5)
    like = eqx.nn.ConvTranspose1d(6, 6, 4, use_bias=False, key=jax.random.key(0))
    read = eqx.combine(rpx.io.from_torch(rpx.Chain(), module.state_dict(), like), like)
    np.testing.assert_allclose(read(jnp.asarray(x[0]))[None], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["kernel", "same"])
@pytest.mark.parametrize("map", ["cayley", "matrix_exp", "householder"])
def test_modules_without_trivialization_load_what_is_written(map, layout):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(3, 5, bias=False)}).double()
    for module in model.values():
        parametrizations.orthogonal(module, orthogonal_map=map, use_trivialization=False)
    like = {"a": {"kernel": np.eye(4), "bias": np.zeros(4)}, "b": {"kernel": np.eye(3, 5)}}
    p, how = (
        rpx.Orthogonal("expm" if map == "matrix_exp" else map),
        {"orthogonal_map": map, "layouts": {"a/kernel": layout}},
    )
    with jax.enable_x64():
        raw = rpx.io.from_torch(p, model.state_dict(), like, **how)
        state = rpx.io.to_torch(p, raw, style="no_trivialization", **how)
    before = {name: x.detach().numpy() for name, x in weights(model).items()}
    with torch.no_grad():
        model["a"].bias.zero_()
    model.load_state_dict({name: torch.from_numpy(x) for name, x in state.items()}, strict=True)
    for name, x in weights(model).items():
        np.testing.assert_allclose(x.detach(), before[name], rtol=0, atol=1e-12)


def test_a_module_of_several_styles_loads_what_is_written():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in "abcd"}).double()
    old(torch.nn.utils.weight_norm)(model["a"])
    parametrizations.weight_norm(model["b"])
    for name in "cd":
        parametrizations.orthogonal(model[name], orthogonal_map="cayley", use_trivialization=name == "d")
    like = {name: {"kernel": np.eye(3)} for name in "abcd"}
    p = rpx.WeightNorm(where="[ab]/kernel") >> rpx.Orthogonal(where="[cd]/kernel")
    rules = {"orthogonal_map": {"[cd]/kernel": "cayley"}}
    with jax.enable_x64():
        raw = rpx.io.from_torch(p, model.state_dict(), like, **rules)
        for how in ({"style": {"a/.*": "hooks", "c/.*": "no_trivialization"}}, {"like": model.state_dict()}):
            state = rpx.io.to_torch(p, raw, **rules, **how)
            before = {name: x.detach().numpy() for name, x in weights(model).items()}
            with torch.no_grad():
                for x in model.parameters():
                    x.zero_()
            model.load_state_dict({name: torch.from_numpy(x) for name, x in state.items()}, strict=True)
            for name, x in weights(model).items():
                np.testing.assert_allclose(x.detach(), before[name], rtol=0, atol=1e-12)


def steps_of_torch(model, targets, n_steps=10):
    """Steps of gradient descent away from where the modules are."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss_of_torch(model, targets).backward()
        optimizer.step()


def by_default():
    """Modules of all shapes after ten steps, parametrized by a bare ``orthogonal``, and their parameters here."""
    torch.manual_seed(0)
    modules = {"tall": torch.nn.Linear(4, 6), "wide": torch.nn.Linear(6, 4), "square": torch.nn.Linear(5, 5)}
    modules["conv"] = torch.nn.Conv2d(3, 2, (3, 2))  # a matrix (3, 2) for each output and input
    model = torch.nn.ModuleDict(modules).double()
    for module in model.values():
        parametrizations.orthogonal(module)
    steps_of_torch(model, {name: torch.randn_like(w) for name, w in weights(model).items()})
    return model, {
        name: {"weight": np.zeros(w.shape), "bias": np.zeros(w.shape[0])} for name, w in weights(model).items()
    }


def assert_weights(model, effective):
    for name in effective:
        np.testing.assert_allclose(effective[name]["weight"], model[name].weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("map", ["cayley", "expm", "householder"])
def test_orthogonal_with_torchs_defaults_gives_its_weights_there_and_back(map):
    """A chain of another map than torch has takes the weight alone; also after steps, and back in torch."""
    model, like = by_default()
    matrices = rpx.Orthogonal(map, where="(tall|wide|square)/weight")
    p = matrices >> rpx.Orthogonal(map, where="conv/weight", stacked=(0, 1))
    options = {"layouts": {".*/weight": "same"}, "orthogonal_map": "default"}
    with jax.enable_x64():
        raw = rpx.io.from_torch(p, model.state_dict(), like, **options)
        assert_weights(model, p.fold(raw))
        kernels = tuple((name, "weight") for name in like)
        for _ in range(10):
            targets = {name: np.random.default_rng(5).normal(size=like[name]["weight"].shape) for name in like}
            raw, _ = trained(p, kernels, raw, targets)
        for said in ({}, {"orthogonal_map": "default"}):
            state = rpx.io.to_torch(p, raw, layouts={".*/weight": "same"}, **said)
            model.load_state_dict({name: torch.from_numpy(x) for name, x in state.items()}, strict=True)
            assert_weights(model, p.fold(raw))


@pytest.mark.parametrize("map", ["cayley", "matrix_exp", "householder"])
@pytest.mark.parametrize("sizes", [(4, 6), (6, 4), (5, 5)])
@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_orthogonal_is_read_into_layers_whose_class_tells_the_axes_and_written_back(library, sizes, map):
    """Linear layers of nnx hold (in, out) and those of equinox (out, in), as torch: both give torch's outputs."""
    torch.manual_seed(0)
    model = torch.nn.Linear(*sizes).double()
    parametrizations.orthogonal(model, orthogonal_map=map)
    x = np.random.default_rng(0).normal(size=(3, sizes[0]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.mean((model(torch.tensor(x)) - 1) ** 2).backward()
        optimizer.step()
    with jax.enable_x64():
        if library == "nnx":
            like, names = nnx.Linear(*sizes, rngs=nnx.Rngs(0), param_dtype=jnp.float64), {"kernel": "weight"}
        else:
            like, names = eqx.nn.Linear(*sizes, key=jax.random.key(0), dtype=jnp.float64), None
        p = rpx.Orthogonal({"matrix_exp": "expm"}.get(map, map), where="kernel|weight")
        raw = rpx.io.from_torch(p, model.state_dict(), like, names=names, orthogonal_map=map)
        layer = p.apply(raw)
        outputs = layer(x) if library == "nnx" else jax.vmap(layer)(x)
        np.testing.assert_allclose(outputs, model(torch.tensor(x)).detach(), rtol=0, atol=1e-12)
        state = rpx.io.to_torch(p, raw, names=names, orthogonal_map=map)
    model.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in state.items()}, strict=True)
    np.testing.assert_allclose(outputs, model(torch.tensor(x)).detach(), rtol=0, atol=1e-12)


def test_a_trained_matrix_of_an_unknown_map_is_refused():
    model, like = by_default()
    like = {"tall": like["tall"]}
    state = {name: x for name, x in model.state_dict().items() if name.startswith("tall")}
    with (
        jax.enable_x64(),
        raises(
            ValueError,
            "from_torch: 'tall/weight': a state dict does not record the map of torch's `orthogonal`: Orthogonal() has "
            "map='cayley', but torch uses 'householder' for the shape (6, 4) by default. Pass "
            "orthogonal_map='default' if `orthogonal` was called without a map, or orthogonal_map='cayley' if it was "
            "called with this map.",
        ),
    ):
        rpx.io.from_torch(rpx.Orthogonal(), state, like, layouts={".*/weight": "same"})
    with jax.enable_x64():
        p = rpx.Orthogonal("householder")
        assert_weights(model, p.fold(rpx.io.from_torch(p, state, like, layouts={".*/weight": "same"})))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_tensors_of_eight_bits_are_read(dtype):
    tensor = torch.tensor([0.5, -3.0, 448.0]).to(getattr(torch, dtype))
    got = rpx.io.from_torch(rpx.Chain(), {"w": tensor}, {"w": jnp.zeros(3, getattr(jnp, dtype))})["w"]
    assert got.dtype == getattr(jnp, dtype)
    np.testing.assert_array_equal(np.asarray(got, np.float32), tensor.float().numpy())


UNREADABLE = {
    "sparse. Pass `x.to_dense()`.": lambda x: x.to_sparse_csr(),
    "on the meta device, without values. Load its values first.": lambda x: x.to("meta"),
    "quantized. Pass `x.dequantize()`.": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("text", "change"), UNREADABLE.items())
def test_tensors_that_hold_no_plain_numbers_are_refused_by_name(text, change):
    x, like = torch.ones(2, 3), {"l": {"kernel": jnp.zeros((3, 2))}}
    with raises(ValueError, f"from_torch takes dense tensors with plain values, but 'l.weight' is {text}"):
        rpx.io.from_torch(rpx.Chain(), {"l.weight": change(x)}, like)


def test_two_names_of_one_parameter_are_a_tie():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "out": torch.nn.Linear(3, 4, bias=False)})
    model["out"].weight = model["embed"].weight
    p = rpx.Tie({"out/kernel": ("embed/embedding", jnp.transpose)}, unequal="overwrite")
    like = {"embed": {"embedding": np.zeros((4, 3), np.float32)}, "out": {"kernel": np.zeros((3, 4), np.float32)}}
    raw = rpx.io.from_torch(p, model.state_dict(), like)
    model.load_state_dict({name: torch.from_numpy(2 * x) for name, x in rpx.io.to_torch(p, raw).items()}, strict=True)
    np.testing.assert_array_equal(
        2 * np.asarray(p.fold(raw)["out"]["kernel"]), model["embed"].weight.detach().numpy().T
    )
