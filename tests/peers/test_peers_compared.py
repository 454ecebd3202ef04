"""What the page on other libraries says of them is there: names, lines, and the types of PEFT."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming_from.md").read_text()
NAMES = {
    "torch.nn.utils.parametrizations": ("weight_norm", "spectral_norm", "orthogonal"),
    "torch.nn.utils.parametrize": ("register_parametrization", "remove_parametrizations", "cached"),
    "torch.nn.utils.prune": ("l1_unstructured", "ln_structured", "global_unstructured", "custom_from_mask"),
    "flax.linen": ("WeightNorm", "SpectralNorm", "map_variables"),
    "flax.nnx": ("WeightNorm", "SpectralNorm", "LoRA"),
    "equinox.nn": ("WeightNorm", "SpectralNorm", "Shared"),
    "haiku": ("SNParamsTree", "custom_getter"),
    "paramax": ("unwrap", "Parameterize", "non_trainable", "WeightNormalization", "AbstractUnwrappable"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", NAMES)
def test_the_names_of_another_library_are_on_the_page_and_in_the_library(module):
    found = pytest.importorskip(module)
    for name in NAMES[module]:
        assert name in PAGE
        assert hasattr(found, name), name


def test_the_lines_of_paramax():
    paramax = pytest.importorskip("paramax")
    lines = sum(len(file.read_text().splitlines()) for file in Path(paramax.__file__).parent.glob("*.py"))
    assert round(lines, -2) == 300
    assert "about three hundred lines" in PAGE


@pytest.mark.filterwarnings("ignore")
def test_the_number_of_types_of_peft():
    peft = pytest.importorskip("peft")
    assert len(peft.PeftType) > 40
    assert "prompts, the hub, more than forty types" in PAGE
    version = ".".join(peft.__version__.split(".")[:2])
    assert (
        f"Of the types in PEFT {version} these are read and written." in (ROOT / "docs" / "api" / "io.md").read_text()
    )
