"""Every Python block of the README runs, and the API pages have every name. `make docs` runs the notebooks."""

import dataclasses
import doctest
import inspect
import re
import tomllib
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from grids import mostly_thorough
from jax.sharding import PartitionSpec
from one_array import normal
from public import FAMILIES, PUBLIC, TOP, TYPES

import reparax as rpx
from benchmarks.common.shown import Results
from benchmarks.evidence.record import found
from benchmarks.evidence.summary import NONE, difference
from benchmarks.evidence.weight_noise import NOISE, NORM, PLAIN, chosen, reported, verdict
from reparax.core.names import FAMILIES as TABLE
from reparax.testing import check_laws

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.md"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
COMING_FROM = ROOT / "docs" / "coming_from.md"
VERSIONS = ROOT / "docs" / "versions.md"
CITATION = ROOT / "CITATION.cff"
CHANGELOG = ROOT / "CHANGELOG.md"
API = sorted((ROOT / "docs" / "api").glob("*.md"))
PROSE = [README, CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md")), *NOTEBOOKS]


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_short(path):
    text = path.read_text()
    tasks = text.count("\n### ") if path.stem == "recipes" else 0  # one cell for each, or two
    assert 0 < text.count("```{code-cell}") <= 13 + tasks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_something_to_change(path):
    (cell,) = re.findall(r"## Try it\n\n[^`#][^#]*?```\{code-cell\}\n(.*?)```", path.read_text(), flags=re.DOTALL)
    assert re.search(r"^for .* in ", cell, flags=re.MULTILINE)  # over two or three values


def test_the_bar_at_the_left_has_at_most_twenty_entries_and_leads_to_all_pages():
    listed = {}
    for page in (ROOT / "docs").rglob("*.md"):
        for entries in re.findall(r"```\{toctree\}\n(?::.*\n)*\n([^`]*)```", page.read_text()):
            names = re.findall(r"([\w/]+)>?$", entries, flags=re.MULTILINE)
            listed.setdefault(page, []).extend((page.parent / f"{name}.md").resolve() for name in names)
    assert len(listed[ROOT / "docs" / "index.md"]) <= 20
    pages = {page.resolve() for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts}
    hidden = {page for page in pages if page.read_text().startswith("---\norphan: true\n")}
    assert {page.stem for page in hidden} == {"performance_data"}
    assert {each for entries in listed.values() for each in entries} == pages - hidden - {ROOT / "docs" / "index.md"}


@pytest.mark.parametrize(
    "path", [README, *sorted((ROOT / "docs").glob("*.md")), *API, *NOTEBOOKS], ids=lambda path: path.stem
)
def test_examples_are_as_wide_as_a_page(path):
    blocks = re.findall(
        r"^( *)```(?:python|\{code-block\} python)\n(.*?)^\1```", path.read_text(), re.DOTALL | re.MULTILINE
    )
    lines = [
        line for _, block in blocks for line in block.split("\n") if ">>>" not in block or line[:3] in (">>>", "...")
    ]
    assert [line for line in lines if len(line) > 88] == []


USERS_LINE = "effective = (rpx.WeightNorm() >> rpx.VarNoise(0.075)).apply(raw, key)"


@pytest.mark.parametrize("page", ["README.md", "docs/notebooks/quickstart.md", "docs/notebooks/noise_text.md"])
def test_the_line_that_users_ask_for_stands_in_a_jitted_step_with_optax(page):
    text = (ROOT / page).read_text()
    steps = re.findall(r"^@jax\.jit\ndef \w*step\(.*?(?=^\S)", text, flags=re.DOTALL | re.MULTILINE)
    assert any(f" {USERS_LINE}\n" in step and "optax.apply_updates(raw, updates)" in step for step in steps)


def run_example(first: str, line: str) -> tuple[dict[str, object], float]:
    """The README's example with another chain, and its first loss."""
    assert "change the chain, and write `p.apply(raw, key)` in the loss:" in README.read_text()
    of_p = re.sub(r"^p = .*", line, first.replace(USERS_LINE, "effective = p.apply(raw, key)"), flags=re.MULTILINE)
    code = first if line in first else of_p
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
    assert f"# {free:,} new parameters train, the model's {fixed:,} do not" in second
    assert f"# from {before:.1f} to {float(noisy['value']):.2f}" in first


def dense(x):
    return hk.Linear(3)(x)


@pytest.mark.parametrize(
    ("row", "models"),
    {
        "flax linen": [nn.Dense(3)],
        "flax nnx, equinox": [nnx.Linear(4, 3, rngs=nnx.Rngs(0)), eqx.nn.Linear(4, 3, key=jax.random.key(0))],
        "haiku": [hk.transform(dense)],
    }.items(),
)
def test_the_lines_of_the_readme_for_each_library_run(row, models):
    (held, line) = re.findall(rf"^\| {row} \| `(.*)` \| `(.*)` \|$", README.read_text(), flags=re.MULTILINE)[0]
    p, x, rng = rpx.VarNoise(0.1), jnp.ones(4), jax.random.key(0)
    for model in models:
        started = model.init(rng, x) if hasattr(model, "init") else None
        names = {"model": model, "params": started, "variables": started}
        names |= {"p": p, "x": x, "rng": rng, "key": jax.random.key(1), "raw": p.init(eval(held, dict(names)))}
        assert eval(line, names).shape == (3,)


def test_the_readme_is_short_and_names_both_commands():
    text = re.sub(r"<[^>]+>", "", README.read_text())
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 450
    assert "    make demo " in text
    assert "    make test\n" in text


def compared(told, task: str, ours: str, other: str) -> dict[str, str]:
    """How one way of training differs from another in each measure of a task: higher, lower or not significantly."""
    here, there = (reported(told[chosen(told, task)[way]]) for way in (ours, other))
    return {what: difference(here[what], there[what]).word for what in here}


def norm_under_noise(told) -> tuple[int, int, int]:
    """In how many comparisons weight norm under noise is better than noise alone, is worse, and all of these."""
    words = [
        word if task == "digits" else {"lower": "higher", "higher": "lower"}.get(word, word)
        for task in ("digits", "text")
        for what, word in compared(told, task, NORM, NOISE).items()
        if what != "as trained"
    ]
    return words.count("higher"), words.count("lower"), len(words)


def test_the_numbers_of_the_readme_are_those_on_file():
    text = re.sub(r"\[(\w+)\]\([^)]*\)", r"\1", " ".join(README.read_text().split()))
    told = found("weight_noise")
    rounded = [reported(told[chosen(told, "text")[way]])["with 3 bits"] for way in (NOISE, PLAIN)]
    noise, plain = (f"{bits.mean():.2f} ± {bits.std(ddof=1) / len(bits) ** 0.5:.2f}" for bits in rounded)
    assert f"at 3 bits, a small text model scores {noise} bits per character with it and {plain} without" in text
    assert "It [does not always help](docs/evidence.md)." in " ".join(README.read_text().split())
    assert compared(told, "digits", NOISE, PLAIN)["as trained"] == NONE
    helped, _, all_ = norm_under_noise(told)
    assert f"Weight norm under the noise is better than noise alone in {helped} of {all_}." in verdict(told)
    results, title = Results.newest(), "16 layers, 32 examples, this machine: temporary MiB"
    under, without = (results.median("batches", title, way) for way in ("remat", "apply"))
    taken = f"takes {under:.0f} MiB of temporary memory instead of {without:.0f}."
    assert f"On a CPU, the gradient of 16 layers at batch 32 {taken}" in text
    (factored,) = re.findall(r"never forms `W \+ A B`, and takes ([\d.]+) of the time", text)
    lora, narrow = "LoRA, 4 layers of 1024, batch 2048: ms", "LoRA, transformer: ms"
    assert float(factored) == pytest.approx(results.ratio("factored", lora, "factored", "apply"), abs=0.01)
    assert results.ratio("factored", narrow, "factored", "all weights train") > 0.95
    assert results.ratio("peers", "noise, 6 layers of 1024", "reparax, remat", "reparax") > 1


def test_the_numbers_of_weights_on_the_host_are_those_on_file():
    text = " ".join((ROOT / "docs" / "performance_data.md").read_text().split())
    results = Results.newest()

    def planned(what: str, way: str) -> float:
        return results.median("hosted", what, way)

    lies, there = "MiB of arguments", "MiB of arguments on the host"
    temporary, gathered = "temporary MiB", "bytes gathered for each weight"
    stay, moved = (planned(what, "bfloat16 on the host") for what in (lies, there))
    layer, codes = (
        planned(temporary, f"{base} on the host") - planned(temporary, f"{base} on the device")
        for base in ("bfloat16", "nf4")
    )
    assert f"in bfloat16 on the host, {stay:.1f} of {stay + moved:.1f} MiB stay on a TPU v5p" in text
    assert (
        f"temporaries grow by one layer, {layer:.0f} MiB. With codes of nf4, they grow by the {codes:.0f} MiB" in text
    )
    ways = [f"nf4 on four chips, gathered as {how}" for how in ("the compiler chooses", "its body says")]
    (all_bytes, few), (before, after) = ([planned(what, way) for way in ways] for what in (gathered, temporary))
    assert (
        f"the body gathers {few:.2f} bytes for each weight, forward and backward, in place of {all_bytes:.0f}" in text
    )
    assert f"and temporaries grow from {before:.0f} MiB to {after:.0f}." in text


@pytest.mark.thorough
def test_the_lines_for_a_cluster_run_after_those_of_their_page(monkeypatch):
    page = (ROOT / "docs" / "notebooks" / "sharding.md").read_text()
    imports, model, chain, *_ = re.findall(r"```\{code-cell\}\n(.*?)```", page, flags=re.DOTALL)
    lines = re.findall(r"^(?:import|from) .*", imports, flags=re.MULTILINE)
    (cluster,) = re.findall(r"## On a cluster.*?```python\n(.*?)```", page, flags=re.DOTALL)
    names = {"this_process_reads": lambda: np.ones((16, 32), np.float32)}
    monkeypatch.setattr(jax.distributed, "initialize", lambda: None)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec("\n".join([*lines, model, chain.partition("\n")[0], cluster]), names)
    raw, batch, specs = (names[name] for name in ("raw", "batch", "specs"))
    assert raw["up"]["@weight_norm"]["v"].sharding.spec == specs["up"]
    assert batch.sharding.spec == PartitionSpec("data")
    assert {axis.name for axis in names["mesh"].axis_types} == {"Auto"}


@pytest.mark.thorough
def test_the_lines_for_weights_in_few_bits_run_after_those_of_their_page():
    page = (ROOT / "docs" / "notebooks" / "sharding.md").read_text()
    imports, model, *_ = re.findall(r"```\{code-cell\}\n(.*?)```", page, flags=re.DOTALL)
    (few,) = re.findall(r"## Weights in few bits.*?```python\n(.*?)```", page, flags=re.DOTALL)
    (mesh,) = re.findall(r"^mesh = .*", imports, flags=re.MULTILINE)
    lines = re.findall(r"^(?:import|from) .*", imports, flags=re.MULTILINE)
    names = {}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec("\n".join([*lines, mesh, model, few]), names)
        q, params, tuned = (names[name] for name in ("q", "params", "tuned"))
        whole = q.init(params, jax.random.key(0))
        raw = jax.device_put(whole, names["kept"])
        x = jax.random.normal(jax.random.key(1), (8, 32))
        got, want = jax.jit(tuned)(raw, x), np.mean(names["network"](q.apply(whole), x) ** 2)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert raw["up"]["@lora"]["@fixed"]["w"]["@quantized"]["@fixed"]["q"].sharding.memory_kind == "pinned_host"


@pytest.mark.thorough
def test_the_lines_for_schedule_free_optimizers_run():
    page = (ROOT / "docs" / "notebooks" / "recipes.md").read_text()
    (lines,) = re.findall(r"Schedule-free.*?```python\n(.*?)```", page, flags=re.DOTALL)
    p = rpx.Freeze(where="b") >> rpx.WeightNorm(where="w")
    raw = p.init({"w": jnp.ones((2, 2)), "b": jnp.ones(2)})
    names = {"rpx": rpx, "optax": optax, "jax": jax, "p": p, "raw": raw, "error": lambda w: jnp.sum(w["w"] * w["b"])}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(lines, names)
    p.check(names["average"], like={"w": jnp.ones((2, 2)), "b": jnp.ones(2)})
    assert not np.array_equal(p.fold(names["average"])["w"], p.fold(raw)["w"])
    np.testing.assert_array_equal(p.fold(names["average"])["b"], np.ones(2))


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_what_a_page_calls_by_our_name_exists(page):
    named = re.findall(r"\brpx\.(\w+)(?:\.(\w+))?", page.read_text())
    assert [name for name, _ in named if not hasattr(rpx, name)] == []
    below = [(FAMILIES[family], name) for family, name in named if family in FAMILIES and name]
    assert [name for family, name in below if not hasattr(family, name)] == []


PAGES = ["axes", "concepts", "experts", "guarantees", "faq", "api/adapters", "api/quantized"]


@pytest.mark.parametrize("page", mostly_thorough(PAGES, "concepts", "guarantees", "api/adapters", "api/quantized"))
def test_the_examples_of_a_page_run(page):
    path = ROOT / "docs" / f"{page}.md"
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(blocks, {}, page, str(path), 0)
    assert len(examples.examples) >= 3
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        runner.run(examples)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.thorough
def test_our_side_of_every_task_runs():
    globs: dict[str, object] = {}
    with jax.numpy_rank_promotion("allow"):
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", COMING_FROM.read_text(), flags=re.DOTALL)):
            exec(compile(block, f"{COMING_FROM.name}, block {number}", "exec"), globs)
    assert globs["grads"]["scale"]["@positive"]["x"].tolist() == [0.5, 2.0]  # of x in exp x, at x = log 0.5, log 2


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
    assert sorted(documented) == sorted([*public, "reparax.testing.check_laws"])
    index = re.findall(r"^   ~(\S+)$", (ROOT / "docs" / "api" / "index.md").read_text(), flags=re.MULTILINE)
    assert sorted(index) == sorted(documented)


def test_the_index_says_which_names_are_at_the_top_and_which_family_a_section_has():
    index = (ROOT / "docs" / "api" / "index.md").read_text()
    (top,) = re.findall(r"\nThese are also importable as `rpx\.NAME`: (.*?)\.\n", index, flags=re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", top)) == sorted(TOP)
    for title, section in re.findall(r"^## (.*?)\n(.*?)```\n", index, flags=re.DOTALL | re.MULTILINE):
        told = {f"reparax.{family}" for family in re.findall(r"`\w+\.(\w+)`", title)}
        assert told == {name.rpartition(".")[0] for name in re.findall(r"^   ~(\S+)$", section, flags=re.MULTILINE)}


def test_the_table_of_stages_says_in_which_family_each_is():
    page = (ROOT / "docs" / "stages.md").read_text()
    listed = set()
    for family, rows in re.findall(
        r"^\| \*\*[\w ]+\*\*, `rpx\.(\w+)` \| \| \|\n((?:\| `.*\n)+)", page, flags=re.MULTILINE
    ):
        names = {name for row in rows.splitlines() for name in re.findall(r"`(\w+)", row.split("|")[1])}
        assert names <= vars(FAMILIES[family]).keys()
        listed |= names
    stages = {name for name, x in PUBLIC.items() if isinstance(x, type) and issubclass(x, rpx.Parametrization)}
    assert listed == stages - vars(rpx.stage).keys()


@pytest.mark.parametrize(
    ("name", "stage"),
    {
        "weight noise": rpx.VarNoise,
        "DropConnect": rpx.WeightDropout,
        "NoisyNet": rpx.Gaussian,
        "QLoRA": rpx.Quantized,
        "IA3": rpx.adapters.Gain,
        "LoHa": rpx.adapters.Hadamard,
        "OFT": rpx.adapters.Rotated,
        "2:4": rpx.sparse.NByM,
        "BitNet": rpx.FakeQuantized,
        "parametrize": rpx.Reparametrization,
    }.items(),
)
def test_a_name_that_people_search_for_is_in_the_table_and_at_the_stage(name, stage):
    assert name in (stage.__doc__ or "")
    assert re.search(rf"^\|[^|]*\b{name}\b[^|]*\|", (ROOT / "docs" / "names.md").read_text(), flags=re.MULTILINE)


def test_the_page_of_versions_names_the_oldest_python_and_jax_and_the_newest_of_the_readme():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| (Python|JAX) \| ([\d.]+) \| ([\d.]+) \|$", VERSIONS.read_text(), flags=re.MULTILINE)
    oldest = {name: row for name, *row in rows}
    assert project["requires-python"] == f">={oldest['Python'][0]}"
    assert project["dependencies"] == [f"jax>={oldest['JAX'][0]}"]
    python, jax_versions = (" to ".join(oldest[name]) for name in ("Python", "JAX"))
    assert f"Tested on Python {python} and JAX {jax_versions}." in README.read_text()


def test_links_to_the_project_are_made_from_one_place():
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"].get("Source")
    named = [line for line in CITATION.read_text().splitlines() if line.startswith("repository-code:")]
    assert named == ([f"repository-code: {address}"] if address else [])


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (.*)$", CHANGELOG.read_text(), flags=re.MULTILINE)
    assert re.fullmatch(rf"\[{re.escape(rpx.__version__)}\] - (Unreleased|\d{{4}}-\d\d-\d\d)", versions[0])
    assert len(versions) == len({version.partition(" ")[0] for version in versions})


def test_the_list_of_the_first_version_is_short_and_has_a_line_for_each_family():
    first = CHANGELOG.read_text().partition("## [0.1.0] - ")[2].partition("\n## ")[0]
    assert len(first.split()) <= 400
    index = (ROOT / "docs" / "api" / "index.md").read_text()
    families = set(re.findall(r"^## \[(.*?)\]\(", index, flags=re.MULTILINE))
    assert families <= set(re.findall(r"^- \*\*(.*?)\*\*: ", first, flags=re.MULTILINE))


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
