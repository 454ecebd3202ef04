"""The rules by which PEFT finds modules, names tensors and keeps settings; files are in ``test_peft.py``."""

import enum
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax.io import _peft_config as config_of
from reparax.io import _peft_read as reader
from reparax.io import _peft_write as writer
from reparax.io._files import is_finite, is_number, is_positive_integer, read_tensors, short_repr
from reparax.io._peft_adapters import Adapter, PeftForm, require_shapes
from reparax.io._peft_config import METHODS, read_config
from reparax.io._peft_target import Target, is_loaded, plain_name, plain_names_of, wrapper_names

LARGEST = float(np.finfo(np.float32).max)


def target(tensor, shape=(2, 3), layout="kernel", path=None, dtype="float32", **more):
    return Target(path or tensor.replace(".", "/"), tensor, shape, np.dtype(dtype), layout, **more)


def by_name(*targets):
    return {each.tensor: each for each in targets}


def result(f, *args):
    """What a call returns, or that it is refused."""
    try:
        return f(*args)
    except ValueError:
        return "refused"


# ---- values of files


@pytest.mark.parametrize(
    ("x", "number", "positive"),
    [
        (1, True, True),
        (0, True, False),
        (-1, True, False),
        (True, False, False),
        (2.0, True, False),
        (LARGEST, True, False),
        (-LARGEST, True, False),
        (2 * LARGEST, False, False),
        (-2 * LARGEST, False, False),
        (10**400, False, True),
        (float("nan"), False, False),
        ("1", False, False),
        (None, False, False),
    ],
)
def test_numbers_of_files_are_finite_in_float32(x, number, positive):
    assert (is_number(x), is_positive_integer(x)) == (number, positive)


@pytest.mark.parametrize(
    ("x", "finite"),
    [([1.0, 2.0], True), ([1.0, np.nan], False), ([-np.inf, 1.0], False), ([1e39, 1.0], False), ([], True)],
)
def test_arrays_of_files_are_finite_in_float32(x, finite):
    assert is_finite(np.array(x, np.float64)) is finite


@pytest.mark.parametrize(
    ("value", "size"),
    [("x" * 4000, 80), (10**90, 95), (10**4000, 40), ([[[[[[0]]]]]], 40), (np.zeros(900), 90), ({"a": "b"}, 10)],
)
def test_a_short_text_of_a_value_is_short(value, size):
    assert len(short_repr(value)) <= size


class Tensor:
    """A tensor of torch, as far as a reader needs it."""

    shape = (2,)

    def __init__(self, dtype="torch.float32", **kind):
        self.dtype, self.is_meta, self.is_quantized, self.layout = dtype, False, False, "torch.strided"
        vars(self).update(kind)

    def detach(self):
        raise AssertionError

    def float(self):
        return Tensor()

    def numpy(self, *, force):
        assert force
        assert self.dtype not in ("torch.bfloat16", "torch.float8_e4m3fn")
        return np.ones(2, self.dtype.removeprefix("torch."))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "float16"])
def test_a_tensor_of_torch_keeps_its_dtype(dtype):
    (x,) = read_tensors("f", {"w": Tensor(f"torch.{dtype}")}, "dict", "").values()
    assert (type(x), x.dtype, x.tolist()) == (np.ndarray, jnp.dtype(dtype), [1, 1])


@pytest.mark.parametrize("kind", [{"is_meta": True}, {"is_quantized": True}, {"layout": "torch.sparse_coo"}])
def test_a_tensor_of_torch_without_plain_values_is_refused(kind):
    with pytest.raises(ValueError, match=r"^f takes dense tensors with plain values, but 'b' is"):
        read_tensors("f", {"a": Tensor(), "b": Tensor(**kind)}, "dict", "")


# ---- settings

METHOD = {
    "LORA": {"peft_type": "LORA"},
    "IA3": {"peft_type": "IA3"},
    "TRAINABLE_TOKENS": {"peft_type": "TRAINABLE_TOKENS"},
}
NAMES = ([["q"], ("q",), {"q"}, []], [[1], 5, {"q": 1}])
TEXTS = (NAMES[0] + ["q|v"], NAMES[1] + ["("])
FLAGS = ([True, False], [1, "yes"])
RANKS = ([{}, {"q": 2}], [{"q": 0}, {"(": 2}, ["q"], {"q": 2.5}])
NUMBERS = ([{}, {"q": 0.5}, {"q": -1}], [{"q": "1"}, {"q": True}, {"(?i)q": 1}, 3])
INDICES = ([[], [0, 3], (2**31 - 1,)], [[-1], [True], [2**31], 3, ["0"], [1.0]])
ANYTHING = ([3, "x", {"a": 1}, [0]], [])
LORA_SETTINGS = {
    "r": ([1, 64], [0, True, None, 2.0]),
    "lora_alpha": ([4, 0.5, -1.0], [True, "4", None, float("inf")]),
    "lora_dropout": ([0, 0.5], ["a"]),
    "rank_pattern": RANKS,
    "alpha_pattern": NUMBERS,
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"), FLAGS),
    "bias": (["none", "all", "lora_only"], ["some", None, True]),
    "target_parameters": NAMES,
    "trainable_token_indices": (INDICES[0] + [{"a": [1]}], [{"a": 1}, {"a": [-1]}, 5, {"a": [1], "b": [True]}]),
    **dict.fromkeys(
        ("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"), ANYTHING
    ),
    "runtime_config": ANYTHING,
}
COMMON = {
    **dict.fromkeys(
        ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"), ANYTHING
    ),
    "target_modules": (TEXTS[0], TEXTS[1] + ["all-linear", "ALL-LINEAR"]),
    "exclude_modules": TEXTS,
    "modules_to_save": (NAMES[0], NAMES[1] + ["q"]),
    "layers_to_transform": ([0, 3, [0, 3], []], [True, "0", [0, "1"], -1]),
    "layers_pattern": (["layers", ["layers", "h"]], ["(", ["layers", 3], ["layers", "(?i)h"]]),
}
SETTINGS = [
    *(("LORA", name, *values) for name, values in {**LORA_SETTINGS, **COMMON}.items()),
    ("IA3", "fan_in_fan_out", *FLAGS),
    ("IA3", "feedforward_modules", *TEXTS),
    ("IA3", "init_ia3_weights", *ANYTHING),
    *(("IA3", name, *values) for name, values in COMMON.items()),
    ("TRAINABLE_TOKENS", "token_indices", *INDICES),
    ("TRAINABLE_TOKENS", "init_weights", *ANYTHING),
    *(("TRAINABLE_TOKENS", name, *values) for name, values in COMMON.items()),
]


@pytest.mark.parametrize(("method", "name", "right", "wrong"), SETTINGS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_setting_has_values_of_its_kind(method, name, right, wrong):
    for value in right:
        assert read_config({"peft_type": method, name: value})[name] == value
    for value in wrong:
        with pytest.raises(ValueError, match=f"^from_peft: {name} of {method} must be "):
            read_config({"peft_type": method, name: value})


def test_all_settings_are_among_them():
    known = {
        (method, name) for method in METHODS for names in METHODS[method].settings.values() for name in names.split()
    }
    common = {(method, name) for method in METHODS for names in config_of._COMMON.values() for name in names.split()}
    assert {(method, name) for method, name, *_ in SETTINGS} == (known | common) - {(x, "peft_type") for x in METHODS}


class Kind(enum.StrEnum):
    LORA = "LORA"


def test_a_configuration_has_the_defaults_of_peft_and_no_settings_of_none():
    assert read_config({"peft_type": Kind.LORA, "use_dora": None, "later": None, "r": 3}) == {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 8,
        "bias": "none",
    }
    assert type(read_config({"peft_type": Kind.LORA})["peft_type"]) is str


@pytest.mark.parametrize(
    ("method", "name", "value", "supported"),
    [
        *(("LORA", "init_lora_weights", value, True) for value in (True, False, "gaussian", "Orthogonal", "EVA")),
        *(("LORA", "init_lora_weights", value, False) for value in ("pissa", "olora", "loftq", 1, "pissa_niter_4")),
        ("IA3", "init_lora_weights", True, False),
        *(("IA3", "later", value, True) for value in (False, 0, [], {}, "")),
        *(("IA3", "later", value, False) for value in (True, 1, ["a"], {"a": 0}, "none")),
        ("IA3", "r", 3, False),
        ("TRAINABLE_TOKENS", "feedforward_modules", ["a"], False),
        ("LORA", "token_indices", [1], False),
    ],
)
def test_what_is_unknown_must_be_neutral(method, name, value, supported):
    refused = pytest.raises(ValueError, match=f"^from_peft does not support {method} with {name}=")
    with nullcontext() if supported else refused:
        read_config({"peft_type": method, name: value})


@pytest.mark.parametrize("config", [None, [("peft_type", "LORA")], {}, "LORA"])
def test_a_configuration_is_a_dict_with_a_type(config):
    with pytest.raises(ValueError, match=r"^from_peft takes the contents of adapter_config.json"):
        read_config(config)


# ---- modules that a configuration names


@pytest.mark.parametrize(
    ("names", "module", "want"),
    [
        (["q"], "a.q", True),
        (["q"], "q", True),
        (["q"], "a.xq", False),
        (["v", "a.q"], "b.a.q", True),
        ([], "q", False),
        ("q", "q", True),
        ("q", "a.q", False),
        (r".*\.q", "a.q", True),
        (r".*\.q", "a.q.b", False),
    ],
)
def test_names_are_ends_and_an_expression_is_the_whole(names, module, want):
    assert config_of.matches_names(names, module) is want


@pytest.mark.parametrize(
    ("config", "module", "want"),
    [
        ({}, "a.q", False),
        ({"target_modules": ["q"]}, "a.q", True),
        ({"target_modules": ["q"], "exclude_modules": ["a.q"]}, "a.q", False),
        ({"target_modules": ["q"], "exclude_modules": ["a.q"]}, "b.q", True),
        ({"target_modules": ".*q", "exclude_modules": "a.*"}, "a.q", False),
        ({"target_modules": ["q"], "modules_to_save": ["a"]}, "a.q", False),
        ({"target_modules": ["q"], "modules_to_save": ["b"]}, "a.q", True),
        ({"target_modules": ["q"], "layers_to_transform": 0}, "m.layers.0.q", True),
        ({"target_modules": ["q"], "layers_to_transform": 0}, "m.layers.1.q", False),
        ({"target_modules": ["q"], "layers_to_transform": 0}, "m.q", False),
        ({"target_modules": ["q"], "layers_to_transform": []}, "m.q", True),
        ({"target_modules": ["q"], "layers_to_transform": [1, 12]}, "m.layers.12.attn.q", True),
        ({"target_modules": ["q"], "layers_to_transform": [2]}, "m.layers.12.q", False),
        ({"target_modules": ".*q", "layers_to_transform": [1]}, "m.layers.0.q", True),
        ({"target_modules": ["m.layers.0.q"], "layers_to_transform": [1]}, "m.layers.0.q", True),
        ({"target_modules": ["layers.0.q"], "layers_to_transform": [1]}, "m.layers.0.q", False),
        ({"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "h"}, "m.h.1.q", True),
        ({"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "h"}, "m.layers.1.q", False),
        ({"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": ["g", "h"]}, "m.h.1.q", True),
        ({"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": ["g", "h"]}, "h.1.g.2.q", False),
        ({"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": []}, "m.layers.1.q", True),
        ({"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "h"}, "h.1.h.2.q", True),
    ],
)
def test_an_adapted_module_is_named_and_in_a_layer_and_neither_excluded_nor_saved(config, module, want):
    assert config_of.is_adapted(config, module) is want


@pytest.mark.parametrize(
    ("names", "module", "want"),
    [
        (["head"], "head", True),
        (["head"], "m.head", True),
        (["head"], "m.head.dense.out", True),
        (["head"], "m.heads", False),
        (["head"], "m.bighead", True),
        (["x", "m.head"], "m.head.out", True),
        (["out"], "m.head", False),
        (None, "m.head", False),
    ],
)
def test_a_saved_module_is_one_whose_name_or_ancestor_ends_so(names, module, want):
    assert config_of.is_saved({"modules_to_save": names}, module) is want


@pytest.mark.parametrize(
    ("names", "module", "want"),
    [
        (["fc"], "a.fc", True),
        (["x", "fc"], "a.myfc", True),
        (["fc"], "a.fc.b", False),
        (".*fc", "a.fc", True),
        ("fc", "a.fc", False),
        (None, "a.fc", False),
        ([], "a.fc", False),
    ],
)
def test_gains_of_inputs_are_those_of_modules_whose_names_end_so(names, module, want):
    assert config_of.is_feedforward({"feedforward_modules": names}, module) is want


@pytest.mark.parametrize(
    ("patterns", "module", "want"),
    [
        ({"q": 2, "a.q": 3}, "b.a.q", 2),
        ({"a.q": 3, "q": 2}, "b.a.q", 3),
        ({"^q": 2}, "a.q", 8),
        ({"^q": 2}, "q", 2),
        ({"q": 2}, "a.xq", 8),
        ({"a.*": 2}, "a.q", 2),
        (None, "q", 8),
    ],
)
def test_the_first_pattern_at_the_end_of_a_name_gives_its_number(patterns, module, want):
    config = {"rank_pattern": patterns, "r": 8, "alpha_pattern": {".*": 5}, "lora_alpha": 9}
    assert config_of.number_for(module, config, "rank_pattern", "r") == want


@pytest.mark.parametrize(
    ("indices", "want"),
    [([1, 2], [1, 2]), ({"x": [3], "embed": [4], "m.embed": [5]}, [4]), ({"x": [3]}, []), (None, []), ({}, [])],
)
def test_tokens_are_those_of_the_first_table_whose_name_it_is(indices, want):
    assert config_of.token_indices({"trainable_token_indices": indices}, "m.embed") == want


OF_LORA = tuple(suffix for suffix in METHODS["LORA"].suffixes if suffix != "token_adapter.trainable_tokens_delta")
TOKENS, BIAS = ("token_adapter.trainable_tokens_delta",), ("lora_B.bias",)
LORA = {"peft_type": "LORA", "bias": "none", "target_modules": ["q"]}


@pytest.mark.parametrize(
    ("config", "tensor", "want"),
    [
        ({}, "a.q.weight", {"target_modules": OF_LORA}),
        ({}, "a.q.bias", {}),
        ({}, "a.q.other", {}),
        ({}, "a.v.weight", {}),
        ({"peft_type": "IA3"}, "a.q.weight", {"target_modules": ("ia3_l",)}),
        ({"lora_bias": True}, "a.q.bias", {"lora_bias": BIAS}),
        ({"lora_bias": True}, "a.v.bias", {}),
        ({"bias": "lora_only"}, "a.q.bias", {"bias": ("",)}),
        ({"bias": "lora_only"}, "a.v.bias", {}),
        ({"bias": "all", "lora_bias": True}, "a.q.bias", {"lora_bias": BIAS, "bias": ("",)}),
        ({"bias": "all"}, "a.v.bias", {"bias": ("",)}),
        ({"bias": "all"}, "a.v.weight", {}),
        ({"modules_to_save": ["a"]}, "a.q.weight", {"modules_to_save": ("",)}),
        ({"modules_to_save": ["a"], "bias": "all"}, "a.v.bias", {"modules_to_save": ("",)}),
        (
            {"trainable_token_indices": {"q": [1]}},
            "a.q.weight",
            {"target_modules": OF_LORA, "trainable_token_indices": TOKENS},
        ),
        ({"trainable_token_indices": {"v": [1]}}, "a.v.weight", {"trainable_token_indices": TOKENS}),
        ({"trainable_token_indices": {"v": []}}, "a.v.weight", {}),
        ({"trainable_token_indices": {"v": [1]}}, "a.v.bias", {}),
        ({"trainable_token_indices": [1]}, "a.v.weight", {}),
        ({"target_parameters": ["up"]}, "a.up", {"target_parameters": OF_LORA}),
        ({"target_parameters": ["v.weight"]}, "a.v.weight", {"target_parameters": OF_LORA}),
        ({"target_parameters": ["up"]}, "a.down", {}),
    ],
)
def test_each_setting_that_selects_a_parameter_wants_its_tensors(config, tensor, want):
    assert config_of.expected_suffixes(LORA | config, tensor) == want


@pytest.mark.parametrize(
    ("config", "tensor", "suffix", "name", "want"),
    [
        ({"target_modules": None}, "a.v.weight", "lora_A.weight", "a.v.lora_A.weight", True),
        ({"target_modules": None, "target_parameters": ["up"]}, "a.v.weight", "lora_A.weight", "", False),
        ({}, "a.q.weight", "lora_A.weight", "", True),
        ({}, "a.v.weight", "lora_A.weight", "", False),
        ({"trainable_token_indices": [1]}, "a.v.weight", TOKENS[0], "", True),
        ({"trainable_token_indices": {"v": [1]}}, "a.v.weight", TOKENS[0], "", True),
        ({"trainable_token_indices": {"q": [1]}}, "a.v.weight", TOKENS[0], "", False),
        ({"lora_bias": True}, "a.q.bias", BIAS[0], "", True),
        ({}, "a.q.bias", BIAS[0], "", False),
        ({}, "a.q.bias", "", "a.q.base_layer.bias", True),
        ({}, "a.q.bias", "", "a.q.bias", False),
        ({}, "a.v.bias", "", "a.v.bias", True),
        ({}, "a.v.bias", "", "a.v.base_layer.bias", False),
        ({}, "a.v.weight", "", "a.v.modules_to_save.weight", False),
        ({"modules_to_save": ["v"]}, "a.v.weight", "", "a.v.modules_to_save.weight", True),
        ({"modules_to_save": ["v"]}, "a.v.weight", "", "a.v.weight", True),
        ({"modules_to_save": ["v"]}, "a.v.weight", "", "a.v.base_layer.weight", False),
        ({"target_parameters": ["a.up"]}, "a.bias", "", "a.base_layer.bias", True),
        ({"target_parameters": ["a.up"]}, "a.bias", "", "a.bias", True),
        ({"target_parameters": []}, "a.bias", "", "a.base_layer.bias", False),
    ],
)
def test_a_tensor_is_loaded_if_peft_has_it_under_this_name(config, tensor, suffix, name, want):
    assert is_loaded(LORA | config, tensor, suffix, name) is want


# ---- names of tensors


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("base_model.model.a.weight", "a.weight"),
        ("a.weight", "a.weight"),
        ("base_model.model.base_model.model.a", "base_model.model.a"),
        ("a.base_layer.weight", "a.weight"),
        ("a.base_layer.base_layer.weight", "a.weight"),
        ("a.modules_to_save.weight", "a.weight"),
        ("a.modules_to_save.default.weight", "a.weight"),
        ("a.default.weight", "a.default.weight"),
        ("a.modules_to_save.default.default.weight", "a.default.weight"),
        ("a.base_layernorm.weight", "a.base_layernorm.weight"),
    ],
)
def test_a_plain_name_has_no_wrappers(name, want):
    assert plain_name(name) == want


@pytest.mark.parametrize(
    ("method", "name", "want"),
    [
        ("LORA", "a.lora_A.weight", "lora_A.weight"),
        ("LORA", "a.lora_B.bias", "lora_B.bias"),
        ("LORA", "a.xlora_A.weight", None),
        ("LORA", "lora_A.weight", None),
        ("LORA", "a.ia3_l", None),
        ("LORA", "a.token_adapter.trainable_tokens_delta", "token_adapter.trainable_tokens_delta"),
        ("TRAINABLE_TOKENS", "a.token_adapter.trainable_tokens_delta", "trainable_tokens_delta"),
        ("IA3", "a.ia3_l", "ia3_l"),
    ],
)
def test_a_suffix_follows_a_dot(method, name, want):
    assert METHODS[method].suffix_of(name) == want


def expert(name, rule=None):
    return target(f"m.experts.{name}", (3, 4, 6), "experts:kernel", rule=rule)


def test_the_wrapper_of_the_last_parameter_is_the_outermost():
    outer, inner = "m.experts", "m.experts.base_layer"
    assert wrapper_names([expert("up", 1), expert("down", 4)]) == {"m.experts.down": outer, "m.experts.up": inner}
    assert wrapper_names([expert("a", 2), expert("b", 0), expert("c", 1), target("n.w")]) == {
        "m.experts.a": outer,
        "m.experts.c": inner,
        "m.experts.b": f"{inner}.base_layer",
        "n.w": "n",
    }
    assert wrapper_names([expert("up")]) == {"m.experts.up": outer}
    for rules in ((None, 1), (None, None), (1, 1)):
        with pytest.raises(ValueError, match=r"PEFT adapts several parameters of 'm.experts' in the module's order"):
            wrapper_names([expert(name, rule) for name, rule in zip("ab", rules, strict=True)])


def test_a_stack_of_experts_keeps_its_own_name():
    targets = by_name(expert("up", 0), expert("down", 1), target("m.q.weight"))
    names = {
        "base_model.model.m.experts.lora_A.weight": "m.experts.down.lora_A.weight",
        "base_model.model.m.experts.base_layer.lora_A.weight": "m.experts.up.lora_A.weight",
        "base_model.model.m.experts.base_layer.bias": "m.experts.bias",
        "base_model.model.m.q.lora_A.weight": "m.q.lora_A.weight",
        "m.modules_to_save.q.base_layer.weight": "m.q.weight",
    }
    config = LORA | {"target_parameters": ["up", "experts.down"]}
    assert plain_names_of(names, METHODS["LORA"].suffixes, config, targets) == names
    weight = {"m.q.lora_A.weight": "m.q.lora_A.weight"}
    assert (
        plain_names_of(weight, METHODS["LORA"].suffixes, LORA | {"target_parameters": ["q.weight"]}, targets) == weight
    )


@pytest.mark.parametrize("wrong", [target("m.q.kernel"), target("m.q.weight", (2, 3, 4)), target("m.q.weight", (2,))])
def test_a_parameter_that_is_named_is_a_matrix_or_a_stack_of_experts(wrong):
    with pytest.raises(ValueError, match="as a parameter, so it needs a layout of experts"):
        plain_names_of([], (), LORA | {"target_parameters": [wrong.tensor]}, by_name(target("m.v.weight"), wrong))


# ---- models in memory

LIVE = {
    "m.q.base_layer.weight": None,
    "m.q.base_layer.bias": "bias of q",
    "m.v.bias": "bias of v",
    "m.q.lora_A.one.weight": "m.q.lora_A.weight",
    "m.q.lora_B.one.weight": "m.q.lora_B.weight",
    "m.q.lora_B.one.bias": "m.q.lora_B.bias",
    "m.q.lora_magnitude_vector.one.weight": "m.q.lora_magnitude_vector",
    "m.e.lora_embedding_A.one": "m.e.lora_embedding_A",
    "m.t.token_adapter.trainable_tokens_delta.one": "m.t.token_adapter.trainable_tokens_delta",
    "m.q.lora_A.two.weight": None,
    "m.q.lora_E.one": "m.q.lora_E.one",
    "m.q.lora_E.one.weight": "m.q.lora_E.one.weight",
    "m.q.lora_E.oneself": None,
    "m.q.lora_E.two": None,
    "m.h.original_module.weight": None,
    "m.h.modules_to_save.one.weight": "m.h.modules_to_save.weight",
    "m.h.modules_to_save.one.d.bias": "m.h.modules_to_save.d.bias",
    "m.h.modules_to_save.two.weight": None,
    "m.h.modules_to_save.two.bias": None,
}


@pytest.mark.parametrize(
    ("bias", "biases"),
    [("none", []), ("lora_only", ["m.q.base_layer.bias"]), ("all", ["m.q.base_layer.bias", "m.v.bias"])],
)
def test_tensors_of_one_adapter_in_memory_get_the_names_of_its_file(bias, biases):
    arrays = {name: np.full(1, i) for i, name in enumerate(LIVE)}
    want = {name: file for name, file in LIVE.items() if file and "bias of" not in file} | {
        name: name for name in biases
    }
    found = reader._tensors_of_adapter(arrays, {"peft_type": "LORA", "bias": bias}, "one")
    assert found == {file: arrays[name] for name, file in want.items()}


def test_tensors_of_a_file_keep_their_names():
    arrays = {"m.q.lora_A.weight": 1, "m.q.lora_B.bias": 2, "m.v.bias": 3, "m.h.original_module.weight": 4}
    config = {"peft_type": "LORA", "bias": "none"}
    del (kept := dict(arrays))["m.h.original_module.weight"]
    assert reader._tensors_of_adapter(arrays, config, None) == kept


@pytest.mark.parametrize(
    ("names", "adapter", "want"),
    [
        (["a"], None, "a"),
        (["a", "b"], "b", "b"),
        (["a", "b"], None, "refused"),
        (["a"], "b", "refused"),
        ([], "a", "refused"),
    ],
)
def test_the_adapter_to_read_is_the_one_that_is_named_or_the_only_one(names, adapter, want):
    assert result(reader._choose_adapter, names, adapter) == want


def test_the_reason_for_an_unread_tensor_is_the_model_or_its_name():
    targets = by_name(target("a.q.weight"), target("a.b.q.weight"))
    model, name = "the model has no", "expected a parameter of"
    for parameter, why in (
        ("a.q.bias", model),
        ("a.q.x.weight", name),
        ("a.b.q.other", name),
        ("a.qx.weight", model),
        ("a.b.v.weight", model),
    ):
        assert reader._why_unread("LORA", parameter, targets).startswith(why)
    assert "'a.b.q'" in reader._why_unread("LORA", "a.b.q.other", targets)


# ---- stages of what is read


def test_the_stages_of_layers_are_stacked_before_the_axes_of_their_own():
    def layer(i, j):
        stages = (rpx.LoRA(2, stacked=0), rpx.WeightNorm())
        return Adapter(stages, {"@lora/a": np.full(1, 10 * i + j), "@lora/b": np.zeros(2)})

    stacked = reader._stack_stages("w", {(i, j): layer(i, j) for i in (1, 0) for j in (2, 0, 1)})
    assert stacked.stages == (rpx.LoRA(2, stacked=(0, 1, 2)), rpx.WeightNorm(stacked=(0, 1)))
    np.testing.assert_array_equal(stacked.values["@lora/a"][..., 0], [[0, 1, 2], [10, 11, 12]])
    assert stacked.values["@lora/b"].shape == (2, 3, 2)
    one = layer(0, 0)
    assert reader._stack_stages("w", {(): one}) is one
    with pytest.raises(ValueError, match=r"but layers \(0,\) and \(2,\) have"):
        reader._stack_stages("w", {(0,): one, (1,): one, (2,): Adapter((rpx.LoRA(3),), {})})


def test_arrays_with_equal_stages_share_them():
    lora, scale, delta = rpx.LoRA(2), rpx.numbers.Scale(2.0), rpx.adapters.Delta()
    assert rpx.adapters.Delta().where is None
    layers = {"a/w": (lora,), "b/w": (rpx.LoRA(3),), "c/w": (lora,), "a/b": (scale, delta)}
    found = reader._join_stages({path: Adapter(stages, {}) for path, stages in layers.items()}, [*layers, "d/w"])
    assert found == [
        rpx.LoRA(2, where="(a|c)/w"),
        rpx.LoRA(3, where="b/w"),
        rpx.numbers.Scale(2.0, where="a/b"),
        rpx.adapters.Delta(where="a/b"),
    ]


def test_the_gains_of_outputs_multiply_biases_too():
    targets = by_name(
        target("a.weight", path="a/k"),
        target("a.bias", (3,), path="a/b"),
        target("b.weight", path="b/k"),
        target("b.bias", (3,), path="b/b"),
        target("c.weight", path="c/k"),
        target("d.weight", path="d/k"),
        target("d.bias", (3,), path="d/b"),
        *(target(f"{i}.weight", path="s/k", index=(i,)) for i in range(2)),
        *(target(f"{i}.bias", (3,), path="s/b", index=(i,)) for i in range(2)),
    )
    layers = dict.fromkeys(["a/k", "b/k", "c/k", "s/k"])  # d has no gain, and c no bias
    ties, gains = reader._bias_ties_and_gains(targets, layers, {"feedforward_modules": ["b"]})
    assert ties == [rpx.Tie({"a/b/g": "a/k/g", "s/b/g": "s/k/g"})]
    assert gains == [
        rpx.adapters.Gain(axis=-1, where="a/b"),
        rpx.adapters.Gain(axis=-1, stacked=0, where="s/b"),
    ]
    assert reader._bias_ties_and_gains(targets, layers, {"feedforward_modules": ".*"}) == ([], [])


def test_shapes_that_are_missing_unexpected_or_others_are_told_together():
    tensors = {"a": np.zeros(2), "b": np.zeros(3), "c": np.zeros(1)}
    require_shapes(tensors, {"a": (2,), "b": (3,), "c": (1,)})
    with pytest.raises(
        ValueError, match=r"^d is missing, expected shape \(4,\); c is unexpected; expected b of shape \(2,\)"
    ):
        require_shapes(tensors, {"a": (2,), "b": (2,), "d": (4,)})


# ---- settings that are written


@pytest.mark.parametrize(
    ("numbers", "common", "patterns"),
    [
        ({"a": 2, "b": 2, "c": 3}, 2, {"c": 3}),
        ({"c": 3, "a": 2, "b": 2}, 2, {"c": 3}),
        ({"q": 3, "a.q": 2, "b.q": 2}, 2, {"^q": 3}),
        ({"a.q": 3, "q": 2, "b.q": 2}, 2, {"a.q": 3}),
        ({"q": 3, "aq": 2, "bq": 2}, 2, {"q": 3}),
        ({"a": 0.1 + 0.2, "b": 0.3}, 0.3, {}),
        ({"a": 4.0}, 4, {}),
        ({"a": 2.5, "d": 1, "c": 1, "b": 0}, 1, {"a": 2.5, "b": 0}),
    ],
)
def test_the_number_of_most_modules_is_common_and_others_have_patterns(numbers, common, patterns):
    found = writer._number_setting("r", "rank_pattern", numbers)
    assert found == {"r": common, "rank_pattern": patterns}
    assert list(found["rank_pattern"]) == sorted(patterns)
    assert type(found["r"]) is type(common)


def test_rank_and_alpha_are_those_of_each_module():
    def form(rank, factor, *, root):
        return PeftForm({}, {"use_rslora": root, "use_dora": False, "lora_bias": True}, rank, factor)

    flags = {"use_dora": False, "lora_bias": True}
    found = writer._configure_lora(
        {"a": form(4, 3.0, root=True), "b": form(4, 3.0, root=True), "c": form(9, 1.0, root=True)}
    )
    assert found == flags | {
        "use_rslora": True,
        "r": 4,
        "rank_pattern": {"c": 9},
        "lora_alpha": 6,  # 3 times the root of 4
        "alpha_pattern": {"c": 3},
    }
    mixed = writer._configure_lora({"a": form(4, 3.0, root=True), "b": form(4, 3.0, root=False)})
    assert (mixed["use_rslora"], mixed["lora_alpha"], mixed["alpha_pattern"]) == (False, 12, {})


@pytest.mark.parametrize(
    ("modules", "known", "want"),
    [
        ({"b.q", "a.q"}, {"a.q", "b.q", "v"}, ["a.q", "b.q"]),
        ({"q"}, {"a.q", "q"}, "q"),
        ({"q", "v.0"}, {"a.q", "q", "v.0"}, r"q|v\.0"),
        (set(), {"q"}, []),
    ],
)
def test_modules_are_a_list_unless_it_names_others_too(modules, known, want):
    assert writer._names_setting("target_modules", config_of.is_adapted, modules, known) == {"target_modules": want}


def test_a_bias_is_written_with_the_factor_of_its_weight():
    targets = by_name(
        target("a.weight"), target("a.bias", (3,)), target("b.weight"), target("b.bias", (3,)), expert("up")
    )
    settings = {"lora_bias": False, "use_dora": False}
    weights = {
        name: PeftForm({"lora_A.weight": 1}, settings, 2, 4.0) for name in ("a.weight", "b.weight", "m.experts.up")
    }
    biases = {
        name: PeftForm({"lora_B.bias": np.ones(3)}, factor=factor)
        for name, factor in (("a.bias", 3.0), ("b.bias", 4.0))
    }
    found = writer._written_by_module(weights | biases, targets)
    assert {name: form.settings["lora_bias"] for name, form in found.items()} == {
        "a": True,
        "b": True,
        "m.experts.up": False,
    }
    assert [found[name].tensors["lora_B.bias"].tolist() for name in "ab"] == [[0.75] * 3, [1.0] * 3]
    assert all((form.rank, form.factor, form.tensors["lora_A.weight"]) == (2, 4.0, 1) for form in found.values())
    with pytest.raises(ValueError, match="PEFT adapts a bias only with its weight"):
        writer._written_by_module({"a.bias": biases["a.bias"], "b.weight": weights["b.weight"]}, targets)


def test_a_setting_is_equal_for_all_modules():
    modules = {name: PeftForm({}, {"x": x, "y": 1}) for name, x in (("a", 1), ("b", 1), ("c", 2))}
    assert writer._equal_setting(modules, "y") == 1
    with pytest.raises(ValueError, match="PEFT has one x for all modules, but got 1 at 'a', 1 at 'b', 2 at 'c'"):
        writer._equal_setting(modules, "x")


@pytest.mark.parametrize(
    ("method", "biases", "want"),
    [
        ("LORA", [], "none"),
        ("IA3", [], "none"),
        ("LORA", ["a.bias", "b.bias"], "all"),
        ("LORA", ["a.bias"], "lora_only"),
        ("LORA", ["b.bias"], "refused"),
        ("IA3", ["a.bias"], "refused"),
    ],
)
def test_biases_that_train_are_all_or_those_of_adapted_modules(method, biases, want):
    targets = by_name(*(target(f"{name}.{end}") for name in "ab" for end in ("weight", "bias")), target("c.rel_bias"))
    assert result(writer._biases_setting, method, set(biases), targets, {"a"}) == want


def test_biases_of_a_model_whose_modules_are_all_adapted_are_all():
    targets = by_name(target("a.weight"), target("a.bias"))
    assert writer._biases_setting("LORA", {"a.bias"}, targets, {"a"}) == "all"


ATTENTION = (
    "a.in_proj_weight",
    "a.in_proj_bias",
    "a.out_proj.weight",
    "a.out_proj.bias",
    "b.out_proj.weight",
    "a.q.weight",
)


@pytest.mark.parametrize(
    ("tensor", "refused"),
    [(name, i in (0, 2, 6)) for i, name in enumerate((*ATTENTION, "out_proj.weight"))],
)
def test_attention_of_torch_is_known_by_its_two_matrices(tensor, refused):
    targets = by_name(*map(target, ("in_proj_weight", "out_proj.weight") if tensor[0] == "o" else ATTENTION))
    assert (result(writer._require_no_torch_attention, tensor, targets) == "refused") is refused


@pytest.mark.parametrize(
    ("tensor", "layout", "suffix", "found"),
    [
        ("a.weight", "kernel", "lora_A.weight", True),
        ("weight", "kernel", "lora_A.weight", False),
        ("a.kernel", "kernel", "lora_A.weight", False),
        ("a.bias", "kernel", "lora_A.weight", False),
        ("a.bias", "same", "lora_B.bias", True),
        ("a.weight", "same", "lora_B.bias", False),
        ("a.up", "experts:same", "lora_A.weight", True),
    ],
)
def test_peft_finds_the_weight_or_the_bias_of_a_module(tensor, layout, suffix, found):
    array = target(tensor, (2, 3, 4) if "experts" in layout else (2, 3), layout)
    assert (result(writer._require_findable_name, PeftForm({suffix: 1}), array) is None) is found


@pytest.mark.parametrize(
    ("free", "adapted", "why"),
    [
        (["m.h.weight", "m.h.bias"], {"a"}, None),
        (["m.h.weight", "m.h.bias"], {"m.h"}, "cannot both adapt 'm.h'"),
        (["m.h.weight"], {"a"}, "'m/h/bias' is frozen"),
        (["h.weight"], {"a"}, "name ends in 'h', but 'm.h', which also does"),
        ([], {"a", "m.h"}, None),
    ],
)
def test_a_module_is_saved_whole_if_all_of_it_trains(free, adapted, why):
    count = target("m.h.count", (), "same", dtype="int32")  # which does not train
    targets = by_name(*map(target, ("a.weight", "h.weight", "m.h.weight", "m.h.bias")), count)
    with nullcontext() if why is None else pytest.raises(ValueError, match=why):
        writer._require_savable_modules({targets[tensor].module for tensor in free}, adapted, free, targets)


def test_what_trains_beside_adapters_keeps_its_layout_and_its_wrapper():
    targets = by_name(
        target("a.weight"), target("a.bias", (3,)), target("b.bias", (3,)), target("h.weight"), target("h.bias", (3,))
    )
    free = {name: np.arange(6.0).reshape(targets[name].shape) if "w" in name else np.ones(3) for name in targets}
    del free["a.weight"]
    tensors, config = writer._write_other_trained("LORA", free, targets, {"a"})
    prefix = "base_model.model."
    assert {name.removeprefix(prefix) for name in tensors} == {"a.base_layer.bias", "b.bias", "h.weight", "h.bias"}
    np.testing.assert_array_equal(tensors[f"{prefix}h.weight"], np.arange(6.0).reshape(2, 3).T)
    assert config == {"bias": "all", "modules_to_save": ["h"]}
    some = {"a.bias": np.ones(3)}
    assert writer._write_other_trained("LORA", some, targets, {"a"})[1] == {
        "bias": "lora_only",
        "modules_to_save": None,
    }
    assert writer._write_other_trained("IA3", {}, targets, {"a"}) == ({}, {"modules_to_save": None})


# ---- axes of what PEFT adapts

SHAPES = {  # output axis, input axes, input channels, axes of size one, factor of rank 7
    ("kernel", (2, 3)): (1, (0,), 0, (), (7, 2)),
    ("same", (2, 3)): (0, (1,), 1, (), (7, 3)),
    ("conv1d", (2, 3)): (1, (0,), 0, (), (7, 2)),
    ("embedding", (2, 3)): (1, (0,), 0, (), (7, 2)),
    ("kernel", (4, 5, 2, 3)): (3, (0, 1, 2), 2, (1, 1), (7, 2, 4, 5)),
    ("same", (3, 2, 4, 5)): (0, (1, 2, 3), 1, (1, 1), (7, 2, 4, 5)),
    ("kernel", (4, 2, 3)): (2, (0, 1), 1, (1,), (7, 2, 4)),
}


@pytest.mark.parametrize(("layout", "shape"), SHAPES, ids=str)
def test_each_layout_has_its_inputs_and_outputs(layout, shape):
    output, inputs, channel, ones, factor = SHAPES[layout, shape]
    array = target("a.w", shape, layout)
    assert (array.output_axis, array.input_axes, array.input_channel_axis) == (output, inputs, channel)
    assert (array.n_outputs, array.unit_axes) == (shape[output], ones)
    assert array.input_factor_shape(7) == factor
    assert array.input_and_output_axes == (inputs, (output,))
    assert (array.is_table, array.n_experts, array.adapted_name) == (layout == "embedding", 0, "a")
    assert array.one_expert() is array
    read = jax.eval_shape(array.read_factor, jax.ShapeDtypeStruct(factor, np.float32))
    assert read.shape == (*(shape[axis] for axis in inputs), 7)
    assert jax.eval_shape(array.write_factor, read).shape == factor


@pytest.mark.parametrize(
    ("layout", "shape", "order"), [("kernel", (4, 5, 2, 3), "rihw->hwir"), ("same", (3, 2, 4, 5), "rihw->ihwr")]
)
def test_a_factor_of_a_convolution_has_the_inputs_first(layout, shape, order):
    array, x = target("a.w", shape, layout), np.arange(280, dtype=np.float32).reshape(7, 2, 4, 5)
    read = jax.jit(array.read_factor)(x)
    np.testing.assert_array_equal(read, np.einsum(order, x))
    np.testing.assert_array_equal(jax.jit(array.write_factor)(read), x)


@pytest.mark.parametrize(("layout", "output"), [("experts:kernel", 1), ("experts:same", 0), ("experts:conv1d", 1)])
def test_a_stack_of_experts_is_one_matrix_after_another(layout, output):
    stack = target("m.up", (5, 2, 3), layout)
    assert (stack.n_experts, stack.adapted_name, stack.module) == (5, "m.up", "m")
    one = stack.one_expert()
    assert (one.shape, one.output_axis, one.n_experts) == ((2, 3), output, 0)


@pytest.mark.parametrize(
    ("array", "want"),
    [
        (target("kernel"), {}),
        (target("own"), {"rows": 0, "columns": 1}),
        (target("kernel", layout="same"), {"rows": 1, "columns": 0}),
        (target("kernel", in_unknown_module=True), {"rows": 0, "columns": 1}),
        (target("embedding", layout="embedding"), {}),
        (target("kernel", (3, 2, 4)), {"rows": (0, 1), "columns": 2}),
        (target("kernel", (8, 8), heads=(8, 2, 4), n_inputs=1), {"rows": 0, "columns": (1, 2)}),
        (target("kernel", (8, 8), heads=(2, 4, 8), n_inputs=2), {"rows": (0, 1), "columns": 2}),
    ],
)
def test_axes_are_told_where_the_name_does_not(array, want):
    assert array.axis_arguments == want


@pytest.mark.parametrize(
    ("array", "axes", "fits"),
    [
        (target("w"), {"columns": -1}, True),
        (target("w"), {"columns": 1}, True),
        (target("w"), {"columns": 0}, False),
        (target("w"), {"rows": 0}, True),
        (target("w"), {"rows": -2}, True),
        (target("w"), {"rows": 1}, False),
        (target("w"), {}, True),
        (target("w", layout="same"), {}, False),
        (target("w", layout="same"), {"rows": -1}, True),
        (target("w", (3, 4, 5)), {"columns": -1}, True),
        (target("w", (3, 4, 5)), {"rows": (0, 1)}, True),
        (target("w", (3, 4, 5)), {"rows": 0}, False),
        (target("w", (8, 8), heads=(8, 2, 4), n_inputs=1), {"rows": 0}, True),
        (target("w", (8, 8), heads=(8, 2, 4), n_inputs=1), {"columns": (1, 2)}, True),
        (target("w", (8, 8), heads=(8, 2, 4), n_inputs=1), {"columns": (2, 1)}, False),
        (target("w", (8, 8), heads=(8, 2, 4), n_inputs=1), {"columns": -1}, False),
        (target("w", (8, 8), heads=(2, 4, 8), n_inputs=2), {"columns": -1}, True),
    ],
)
def test_the_rows_of_an_adapter_are_inputs(array, axes, fits):
    assert (result(array.require_rows_are_inputs, rpx.LoRA(2, **axes)) is None) is fits
