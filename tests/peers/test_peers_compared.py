"""What the page "Compared with" says of other libraries is there: their names, and how many types PEFT has."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "compared.md").read_text()
NAMES = {
    "torch.nn.utils.parametrizations": ("weight_norm", "spectral_norm", "orthogonal"),
    "torch.nn.utils.parametrize": ("register_parametrization", "cached"),
    "torch.utils": ("swap_tensors",),
    "flax.linen": ("WeightNorm", "SpectralNorm", "map_variables"),
    "flax.nnx": ("WeightNorm", "SpectralNorm", "LoRA"),
    "equinox.nn": ("WeightNorm", "SpectralNorm", "Shared"),
    "haiku": ("SNParamsTree", "custom_getter"),
    "paramax": ("unwrap", "Parameterize", "NonTrainable", "WeightNormalization", "RealToIncreasingOnInterval"),
    "qwix": ("quantize_model", "apply_lora_to_model"),
    "numpyro.distributions": ("biject_to",),
    "numpyro.contrib.module": ("random_flax_module",),
    "bitsandbytes.nn": ("Linear8bitLt", "Linear4bit"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", NAMES)
def test_the_names_of_another_library_are_on_the_page_and_in_the_library(module):
    found = pytest.importorskip(module)
    for name in NAMES[module]:
        assert name in PAGE
        assert hasattr(found, name), name


@pytest.mark.filterwarnings("ignore")
def test_the_number_of_types_of_peft():
    peft = pytest.importorskip("peft")
    (told,) = re.findall(r"Adapters for torch and transformers, (\d+) types in ([\d.]+)\.\n", PAGE)
    assert told == (str(len(peft.PeftType)), ".".join(peft.__version__.split(".")[:2]))
