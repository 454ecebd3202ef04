"""Numbers in prose that no page computes are those on file, of the code they speak of, or in a notebook's outputs."""

import itertools
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from public import PUBLIC

import reparax as rpx
from benchmarks.common import language
from benchmarks.common.shown import Results
from benchmarks.evidence import CLAIMS
from benchmarks.evidence.record import Size, found, seconds
from benchmarks.evidence.summary import CONFIDENCE
from examples.smollm import report, texts

ROOT = Path(__file__).parents[2]
WORDS = dict(enumerate(["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]))
RESULTS = Results.newest()


def said(path: str) -> str:
    """A page in one line."""
    return " ".join((ROOT / path).read_text().split())


def page(name: str) -> str:
    return said(f"docs/{name}.md")


def printed(name: str) -> str:
    """What the cells of a notebook have printed."""
    (file,) = (ROOT / "notebooks").glob(f"*_{name}.ipynb")
    cells = json.loads(file.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", []) if output["output_type"] == "stream"]
    return "\n".join("".join(output["text"]) for output in outputs)


def constant(module: str, name: str) -> int:
    """A number of a benchmark, which is a script: importing it would measure, or look for torch."""
    text = (ROOT / "benchmarks" / f"{module}.py").read_text()
    names, values = re.findall(rf"^((?:\w+, )*{name}(?:, \w+)*) = (.*)", text, flags=re.MULTILINE)[0]
    return int(values.split(", ")[names.split(", ").index(name)])


def cut(text: str, pattern: str) -> tuple[str, ...]:
    """What stands at the groups of a pattern that occurs once."""
    (match,) = re.finditer(pattern, text)
    return match.groups()


# Counts of the library, and of what it is tested with. ----------------------------------------------------------------


def test_the_number_of_stages():
    kinds = (
        rpx.Chain,
        rpx.Parametrization,
        rpx.stage.Constraint,
        rpx.stage.Joint,
        rpx.Perturbation,
        rpx.Reparametrization,
    )
    stages = [each for each in PUBLIC.values() if isinstance(each, type) and issubclass(each, rpx.Parametrization)]
    assert len(stages) - len(kinds) in range(60, 70)
    assert "the same chain for each library, over sixty stages" in page("compared")


def test_the_smallest_number_of_float32():
    below = f"below {np.finfo(np.float32).tiny:.1e}"
    assert f"numbers {below} on a CPU" in page("guarantees")
    assert f"{below} in float32" in rpx.optimizer.__doc__


# Evidence. ------------------------------------------------------------------------------------------------------------


def test_how_long_the_evidence_took_and_how_many_seeds_it_has():
    text = said("CONTRIBUTING.md")
    minutes = sum(map(seconds, CLAIMS)) / 60
    assert f"each of its settings is a cell with {WORDS[Size().seeds]} seeds." in text
    assert f"All {WORDS[len(CLAIMS)]} took {round(minutes, -1):.0f} minutes on two cores" in text


def test_how_many_claims_the_page_of_evidence_has_and_by_which_test():
    text = page("evidence")
    assert f"{WORDS[len(CLAIMS)].capitalize()} claims, {WORDS[len(CLAIMS) - 1]} from papers and one of our own" in text
    assert re.findall(r'report\(claims\["(\w+)"\]\)', text) == [*CLAIMS]
    assert f"over {WORDS[Size().seeds]} seeds with standard errors" in text
    assert f"(n = {Size().seeds}) gives p below {CONFIDENCE}," in text


def test_without_dropout_the_bits_rise_again_after_as_many_steps_as_the_picture_says():
    course = found("weight_dropout")["nothing, rate 0.0"]["course"].mean(0)
    steps = 100 * (1 + int(np.argmin(course)))
    assert f"Without dropout they rise again after {steps} steps" in page("evidence")


# Benchmarks. ----------------------------------------------------------------------------------------------------------


def test_the_settings_of_the_benchmarks():
    text, data = page("performance"), page("performance_data")
    layers, width, batch = (constant("peers", name) for name in ("LAYERS", "WIDTH", "BATCH"))
    assert f"{WORDS[layers]} dense layers of {width} units, {batch} examples" in text
    assert f"of adapters of rank {constant('factored', 'RANK')} on all matrices" in text
    assert f"against one draw for a batch of {constant('local', 'BATCH')}:" in text
    assert "at least 5 % faster or smaller" in text
    assert ">= 1.05" in (ROOT / "benchmarks" / "common" / "shown.py").read_text()
    layers, width = (constant("transforms", name) for name in ("LAYERS", "WIDTH"))
    assert f"`remat` on scanned layers of {width} x {width}, of {4 * width**2 // 2**20} MiB each," in data
    assert f"The same for {layers} scanned layers of {width}," in data
    layers, width = (constant("hosted", name) for name in ("LAYERS", "WIDTH"))
    assert f"LoRA on {layers} scanned layers of {width} whose frozen base" in data


def test_the_sizes_of_the_models_of_the_benchmarks():
    text, data = page("performance"), page("performance_data")
    millions = sum(math.prod(x.shape) for x in jax.tree.leaves(language.params())) / 1e6
    model_of = f"with {millions:.0f} million parameters and {language.LAYERS} scanned layers"
    assert f"language model {model_of}" in text
    assert f"language model {model_of.replace('with', 'of').replace('and', 'with')}" in data
    n, d, inner, words = (constant("scale", name) for name in ("LAYERS", "WIDTH", "INNER", "VOCABULARY"))
    billions = (n * (4 * d * d + 3 * d * inner) + 2 * words * d) / 1e9
    assert f"a transformer of {billions:.0f} billion parameters" in data
    assert "draw noise for six million weights" in data
    (shape,) = re.findall(r"^SHAPE = \((.*)\)", (ROOT / "benchmarks" / "draws.py").read_text(), flags=re.MULTILINE)
    assert round(math.prod(map(int, shape.split(", "))) / 1e6) == 6


def test_the_statistics_of_random_numbers():
    titles = [title.partition(" normal numbers, ")[2] for title in RESULTS.tables["normality"]]
    powers = sum("mean of power" in each for each in titles)
    assert "chi-square of 64 intervals: standard errors" in titles
    beyond = sorted({float(match[1]) for each in titles if (match := re.search(r"share above ([\d.]+)", each))})
    shares = f"shares beyond {beyond[0]:g} to {beyond[-1]:g} standard deviations"
    assert f"({WORDS[powers]} moments, {shares}, 64 intervals," in page("performance_data")


def test_what_the_pictures_of_the_page_on_performance_are_said_to_show():
    text = page("performance")

    def time(task, way, against="by hand"):
        (title,) = (each for each in RESULTS.tables["peers"] if each.partition(",")[0] == task)
        return RESULTS.ratio("peers", title, way, against)

    norms, tasks = ("weight norm", "spectral norm"), ("noise", "weight norm and noise", "weight dropout")
    assert "half to three quarters for noise, dropout and norms, and somewhat less for orthogonal matrices" in text
    assert all(0.45 < time(task, "reparax") < 0.75 for task in (*norms, *tasks))
    assert 0.7 < time("orthogonal", "reparax") < 0.95
    assert "torch takes longer than by hand in each, but for orthogonal matrices" in text
    assert all(time(task, "torch") > 1 for task in (*norms, *tasks))
    assert time("orthogonal", "torch") < 1
    assert "without protection against zeros, which takes about as long as reparax" in text
    assert all(0.85 < time(task, "reparax", "by hand, NaN at zero") < 1.15 for task in norms)

    def memory(examples, way):
        return RESULTS.median("batches", f"16 layers, {examples} examples, TPU v5p: temporary MiB", way)

    assert "With few examples remat takes a tenth of the memory of apply" in text
    assert 0.08 < memory(32, "remat") / memory(32, "apply") < 0.12
    assert "with many examples apply takes little more than remat" in text
    assert 1 < memory(8192, "apply") / memory(8192, "remat") < 1.1


# Notebooks. -----------------------------------------------------------------------------------------------------------


def test_the_size_of_the_network_with_distributions():
    (count,) = cut(page("notebooks/distributions"), r"With ([\d,]+) weights for 300 digits")
    assert f"nats for {count} weights" in printed("distributions")


def test_outputs_move_as_far_at_each_width_under_mup():
    adam, mup = zip(*re.findall(r"outputs move by ([\d.]+) \(Adam\), ([\d.]+) \(μP\)", printed("recipes")), strict=True)
    assert "you tune the learning rate on a narrow network and reuse it on a wide one" in page("notebooks/recipes")
    assert max(map(float, mup)) < 1.3 * min(map(float, mup))
    assert [float(b) > 2 * float(a) for a, b in itertools.pairwise(adam)] == [True, True]


def test_what_noise_and_norm_do_on_text():
    text = page("notebooks/noise_text")
    rows = re.findall(
        r"^(.+?) +([\d.]+) as trained, ([\d.]+) with noise of \S+, ([\d.]+) in 3 bits", printed("noise_text"), re.M
    )
    kept, noisy, few = ({name: float(row[n]) for name, *row in rows} for n in range(3))
    assert "noise costs a little on unperturbed weights, and pays off once weights are perturbed" in text
    assert kept["plain"] < kept["noise"] < kept["plain"] + 0.2
    assert noisy["noise"] < noisy["plain"]
    assert few["noise"] < few["plain"]
    assert "weight norm helps here, with and without noise" in text
    assert all(of["norm"] < of["plain"] and of["norm, noise"] < of["noise"] for of in (kept, noisy, few))
    assert "at three bits the plain network is highest" in text
    assert max(few, key=few.get) == "plain"


def test_the_loss_of_the_transformer():
    (last,) = cut(page("notebooks/transformer"), r"The training loss over 150 steps falls to ([\d.]+);")
    (loss,) = re.findall(r"loss ([\d.]+) after 150 steps", printed("transformer"))
    assert float(last) == pytest.approx(float(loss), abs=0.06)


def test_what_the_page_on_a_language_model_says_of_the_run_is_what_it_printed():
    printed_, text = (
        (ROOT / "examples" / "smollm" / "results" / "example.txt").read_text(),
        page("notebooks/language_model"),
    )
    assert " ".join(printed_.split()) in text
    cells = found("tuning", report.RESULTS)
    new, old = (np.exp(cells[report.UNTUNED][what][0]) for what in ("new", "old"))
    assert f"Before: perplexity {new:.2f} on programs of JAX, {old:.1f} on English prose" in printed_
    trained = int(cells["LoRA 8, rate 0.003, seed 0"]["trained"][0])
    assert f"Tuning by Freeze() >> LoRA(8, stacked=0): {trained:,} parameters train" in printed_


def test_the_settings_of_the_page_on_a_language_model():
    text, cells = page("notebooks/language_model"), found("tuning", report.RESULTS)
    lines = len((ROOT / "examples" / "smollm" / "model.py").read_text().splitlines())
    assert f"the network is {lines} lines of plain JAX" in text
    functions = len(texts._functions())
    assert (
        f"gradients of {functions - functions // 4} of its functions; the programs of {WORDS[functions // 4]} others"
        in text
    )
    ways = report.of_ways(cells)
    assert {len(rates) for rates in ways.values()} == {3}
    assert {len(each) for each in report.chosen(cells).values()} == {3}
    assert {len(cell["curve"][0]) for name, cell in cells.items() if ", rate " in name} == {20}
    assert "Each row has twenty steps of two windows of 64 tokens by Adam, at the best of three rates" in text
    assert "the mean of three seeds" in text
    curves = [np.mean([cells[name]["curve"][0] for name in names], 0) for names in report.chosen(cells).values()]
    assert "All ways fall from over four nats to less than two" in text
    assert all(curve[0] > 4 and curve[-1] < 2 for curve in curves)


def test_random_networks_with_experts():
    found = json.loads((ROOT / "benchmarks" / "results" / "random_experts.json").read_text())
    assert found["total"]["wrong"] == 0
    assert f"{found['total']['networks']} random networks with experts, written in {len(found['ways'])} ways" in page(
        "experts"
    )
