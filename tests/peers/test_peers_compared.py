"""What the page on other libraries says of them is there: names, versions, lines, and the types of PEFT."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compared.md").read_text()
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


VERSIONS = {
    "torch": r"torch (2[\d.]+\d) has",
    "paramax": r"`RealToIncreasingOnInterval` \(([\d.]+)\)",
    "qwix": r"by rules on module paths \(([\d.]+)\)",
    "numpyro": r"for weights with priors \(([\d.]+)\)",
    "bitsandbytes": r"Kernels for torch \(([\d.]+)\)",
}


@pytest.mark.parametrize("name", VERSIONS)
def test_the_version_of_a_library_is_that_on_the_page(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    (told,) = re.findall(VERSIONS[name], " ".join(PAGE.split()))
    version = importlib.metadata.version(name)
    assert version == told or version.startswith((f"{told}.", f"{told}+"))


def test_the_lines_of_paramax():
    paramax = pytest.importorskip("paramax")
    lines = sum(len(file.read_text().splitlines()) for file in Path(paramax.__file__).parent.glob("*.py"))
    assert round(lines, -2) == 300
    assert "about three hundred lines in all" in PAGE


@pytest.mark.filterwarnings("ignore")
def test_the_number_of_types_of_peft():
    peft = pytest.importorskip("peft")
    (told,) = re.findall(r"Adapters for torch and transformers, (\d+) types in version ([\d.]+)\.\n", PAGE)
    assert told == (str(len(peft.PeftType)), ".".join(peft.__version__.split(".")[:2]))
    page = (ROOT / "docs" / "api" / "adapters.md").read_text()
    assert f"Of the types in PEFT {told[1]} these are read and written." in page
