"""Every Python block of the README runs, and the API pages have every name. `make notebooks` runs the gallery."""

import dataclasses
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from one_array import normal
from public import FAMILIES, PUBLIC, TOP, TYPES

import reparax as rpx
from benchmarks.common.shown import Results
from benchmarks.evidence.record import found
from benchmarks.evidence.summary import NONE, difference
from examples.speech.report import headline
from reparax.core.names import FAMILIES as TABLE
from reparax.core.names import family_by_name
from reparax.testing import check_laws

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.md"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
VERSIONS = ROOT / "docs" / "questions.md"
CITATION = ROOT / "CITATION.cff"
CHANGELOG = ROOT / "CHANGELOG.md"
API = sorted((ROOT / "docs" / "api").glob("*.md"))
PROSE = [README, CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md")), *NOTEBOOKS]


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def run_example(first: str, line: str) -> tuple[dict[str, object], float]:
    """The example of the README or the home page with another chain, and its first loss."""
    code = re.sub(r"^p = .*", line, first, flags=re.MULTILINE)
    code, steps = re.subn(
        r"^    raw, state, value = step.*", r"\g<0>\n    losses.append(value)", code, flags=re.MULTILINE
    )
    assert steps == 1
    names: dict[str, object] = {"losses": []}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile(code, "README", "exec"), names)
    return names, float(names["losses"][0])


@pytest.mark.thorough
def test_readme_runs_and_its_loss_falls_by_both_chains(blocks):
    first, second = blocks
    runs = [run_example(first, line) for line in (re.search(r"^p = .*", first, flags=re.MULTILINE)[0], second)]
    for names, before in runs:
        assert before > 2
        assert names["value"] < 0.05
        assert type(names["plain"]) is type(names["model"])
    (noisy, before), (lora, _) = runs
    free, fixed = (
        sum(x.size for x in jax.tree.leaves(part)) for part in rpx.partition(lora["p"].init(lora["model"], lora["key"]))
    )
    assert f"# Trains {free:,} new parameters; the model's {fixed:,} are frozen." in second
    assert f"# the loss falls from {before:.1f} to {float(noisy['value']):.2f}" in first


@pytest.mark.thorough
def test_the_loss_of_the_home_page_falls_as_it_says():
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), flags=re.DOTALL)[1]
    names, before = run_example(code, re.search(r"^p = .*", code, flags=re.MULTILINE)[0])
    assert f"# the loss falls from {before:.0f} to {float(names['value']):.2f}" in code


def dense(x):
    return hk.Linear(3)(x)


@pytest.mark.parametrize(
    ("row", "make"),
    {
        "flax linen": lambda: [nn.Dense(3)],
        "flax nnx, equinox": lambda: [nnx.Linear(4, 3, rngs=nnx.Rngs(0)), eqx.nn.Linear(4, 3, key=jax.random.key(0))],
        "haiku": lambda: [hk.transform(dense)],
    }.items(),
)
def test_the_lines_of_the_readme_for_each_library_run(row, make):
    (held, line) = re.findall(rf"^\| {row} \| `(.*)` \| `(.*)` \|$", README.read_text(), flags=re.MULTILINE)[0]
    p, x, rng = rpx.VarNoise(0.1), jnp.ones(4), jax.random.key(0)
    for model in make():
        started = model.init(rng, x) if hasattr(model, "init") else None
        names = {"model": model, "params": started, "variables": started}
        names |= {"p": p, "x": x, "rng": rng, "key": jax.random.key(1), "raw": p.init(eval(held, dict(names)))}
        assert eval(line, names).shape == (3,)


def compared(claim, told, task: str, ours: str, other: str) -> dict[str, str]:
    """How one way of training differs from another in each measure of a task: higher, lower or not significantly."""
    here, there = (claim.reported(told[claim.chosen(told, task)[way]]) for way in (ours, other))
    return {what: difference(here[what], there[what]).word for what in here}


def without_links(text: str) -> str:
    """The text of a page in one line, where a link is its words."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))


def test_the_numbers_of_the_readme_are_those_on_file():
    text = without_links(README.read_text())
    on_file = found("weight_noise")
    claim = importlib.import_module("benchmarks.evidence.weight_noise")  # here, as it imports what draws and trains
    ours, other = claim.NOISE, claim.PLAIN
    rounded = [claim.reported(on_file[claim.chosen(on_file, "text")[way]])["with 3 bits"] for way in (ours, other)]
    noise, plain = (f"{bits.mean():.2f} ± {bits.std(ddof=1) / len(bits) ** 0.5:.2f}" for bits in rounded)
    assert f"{noise} bits per character if trained with noise, and {plain} if not (five seeds" in text
    assert len(rounded[0]) == 5
    assert compared(claim, on_file, "digits", ours, other)["as trained"] == NONE
    results, title = Results.newest(), "16 layers, 32 examples, this machine: temporary MiB"
    under, without, by_hand = (results.median("batches", title, way) for way in ("remat", "apply", "by hand"))
    taken = f"16 scanned layers of 2048 at batch 32 takes {under:.0f} MiB of temporary memory"
    as_plain = "as much as without a chain"
    assert f"{taken}, against {without:.0f} with `apply` alone, {as_plain}, and {by_hand:.0f} by hand." in text
    assert round(without) == round(results.median("batches", title, "plain"))
    on_gpu, gpt = Results.newest("nvidia-h200"), "GPT-2, batch 8 x 512: peak MiB of a process"
    assert "on a GPU at batch 8 x 512 it saved nothing" in text
    assert "a small fixed set (twelve voices, no augmentation)" in text
    of_words = headline("digits_lstm")
    assert of_words in text
    assert of_words in without_links((ROOT / "docs" / "index.md").read_text())
    assert on_gpu.ratio("steps", gpt, "remat", "apply") >= 1
    lora = "LoRA, 4 layers of 1024, batch 2048: ms"
    assert "is as fast as LoRA written by hand" in text
    assert results.ratio("factored", lora, "factored", "by hand") == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_what_a_page_calls_by_our_name_exists(page):
    named = re.findall(r"\brpx\.(\w+)(?:\.(\w+))?", page.read_text())
    assert [name for name, _ in named if not hasattr(rpx, name)] == []
    below = [(FAMILIES[family], name) for family, name in named if family in FAMILIES and name]
    assert [name for family, name in below if not hasattr(family, name)] == []


@pytest.mark.thorough
def test_the_new_stage_of_contributing_keeps_the_laws():
    (block,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), flags=re.DOTALL)
    globs: dict[str, object] = {"__name__": "grid"}
    exec(compile(block, CONTRIBUTING.name, "exec"), globs)
    params = {"w": normal(4, 3)}
    check_laws(globs["Grid"](), params)
    loose = type("Loose", (globs["Grid"],), {"raw_values": {"s": rpx.stage.aux()}, "__module__": "grid"})
    with pytest.raises(AssertionError, match="breaks the law of right inverse"):
        check_laws(loose(), params)


def described(page: Path):
    """The whole names of what a page describes."""
    module = ""
    for kind, name in re.findall(
        r"^\.\. (currentmodule|autoclass|autofunction|py:data):: (\w\S*)", page.read_text(), re.MULTILINE
    ):
        if kind == "currentmodule":
            module = name
        else:
            yield f"{module}.{name}"


def test_the_api_pages_have_every_public_name_once():
    documented = [name for page in API for name in described(page)]
    public = [f"reparax.{family}.{name}" for family, (_, names) in TABLE.items() for name in names]
    of_tests = [f"reparax.testing.{name}" for name in ("check_laws", "check_step")]
    assert sorted(documented) == sorted([*public, *of_tests])
    index = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "api" / "index.md").read_text(), flags=re.MULTILINE)
    top = {f"reparax.{family_by_name()[name]}.{name}": f"rpx.{name}" for name in TOP}
    called = top | dict(zip(of_tests, of_tests, strict=True))
    assert sorted(index) == sorted(called.get(name, name.replace("reparax.", "rpx.")) for name in documented)


def test_the_table_of_stages_says_in_which_family_each_is():
    page = (ROOT / "docs" / "choosing.md").read_text()
    listed = set()
    for family, rows in re.findall(
        r"^\| \*\*[\w ]+\*\*, \[`rpx\.(\w+)`\]\(api/\1\.md\) \| \| \| \|\n((?:\| `.*\n)+)", page, flags=re.MULTILINE
    ):
        names = {name for row in rows.splitlines() for name in re.findall(r"`(\w+)", row.split("|")[1])}
        assert names <= vars(FAMILIES[family]).keys()
        listed |= names
    stages = {name for name, x in PUBLIC.items() if isinstance(x, type) and issubclass(x, rpx.Parametrization)}
    assert listed == stages - vars(rpx.stage).keys()


def test_the_page_of_versions_names_the_oldest_python_and_jax_and_the_newest_of_the_readme():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| (Python|JAX) \| ([\d.]+) \| ([\d.]+) \|$", VERSIONS.read_text(), flags=re.MULTILINE)
    oldest = {name: row for name, *row in rows}
    assert project["requires-python"] == f">={oldest['Python'][0]}"
    assert project["dependencies"] == [f"jax>={oldest['JAX'][0]}"]
    python, jax_versions = (" to ".join(oldest[name]) for name in ("Python", "JAX"))
    assert f"Tested on Python {python} and JAX {jax_versions}." in README.read_text()


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (.*)$", CHANGELOG.read_text(), flags=re.MULTILINE)
    assert re.fullmatch(rf"\[{re.escape(rpx.__version__)}\] - (Unreleased|\d{{4}}-\d\d-\d\d)", versions[0])
    assert len(versions) == len({version.partition(" ")[0] for version in versions})


def test_the_citation_names_this_version():
    assert f"\nversion: {rpx.__version__}\n" in CITATION.read_text()


@pytest.mark.parametrize("name", [name for name, x in PUBLIC.items() if name not in TYPES and inspect.isclass(x)])
def test_a_stage_says_what_it_raises_for_each_argument_that_it_checks(name):
    cls = PUBLIC[name]
    own = dataclasses.fields(cls) if issubclass(cls, rpx.Parametrization) and dataclasses.is_dataclass(cls) else ()
    raises = (cls.__doc__ or "").partition("Raises:\n")[2].partition("\n\n")[0]
    checked = [each.name for each in own if rpx.stage.field in each.metadata]
    shared = {"where", "stacked", "rows", "columns", "outside"}  # as Perturbation, LowRank and Constraint say
    assert [each for each in checked if each not in shared and f"``{each}``" not in raises] == []
