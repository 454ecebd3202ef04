"""Pages: their code runs, tables and charts are those of the results, links lead to files, and they are short."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from pages import NEEDS, NOT_RUN, blocks, run

from benchmarks.common.shown import Results
from benchmarks.evidence.record import found
from examples.smollm import report

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def module(path: str):
    """A script of the documentation."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, DOCS / path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


WORDS = module("words.py")
PAGES = sorted(path.stem for path in DOCS.glob("*.md"))
LINKED = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((DOCS / "notebooks").glob("*.md")),
    *(DOCS / f"{page}.md" for page in PAGES),
    *sorted((DOCS / "api").glob("*.md")),
]
PROGRAMS = [page for page in LINKED if page.parent.name != "notebooks"]
RESULTS = Results.newest()


def said(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


# What a page shows ----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("page", [page for page in PROGRAMS if blocks(page)], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(page) == []


def test_only_what_nobody_can_run_alone_is_left_out():
    """Each block of Python runs, here or with ``make test-peers``, but two that need the model of a trainer."""
    first_lines = [block.partition("\n")[0] for page in PROGRAMS for block in blocks(page)]
    assert [line for line in first_lines if line.startswith(NOT_RUN)] == [
        "# Not run here: needs google-tunix, your model, and the config of its trainer.",
        "# Not run here: needs maxtext, and a model that it made.",
    ]
    assert {needed[1] for needed in map(NEEDS.match, first_lines) if needed} <= {"torch", "paramax"}
    unseen = re.compile(r"^ *(?:```|~~~)(?:\{code|py\n|pycon)", flags=re.MULTILINE)
    assert [page.name for page in PROGRAMS if unseen.search(page.read_text())] == []


def test_tables_are_those_of_the_results():
    files = [str(path) for path in LINKED if "[[[cog" in path.read_text()]
    command = [sys.executable, "-m", "cogapp", "--check", "-I", str(DOCS), "-I", str(ROOT), *files]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, f"run: make tables\n{checked.stdout[-2000:]}{checked.stderr[-2000:]}"


def test_charts_are_those_of_the_results():
    draw = module("pictures/draw.py")
    for name, (numbers, _) in draw.CHARTS.items():
        assert draw.digest(numbers()) in (DOCS / "pictures" / f"{name}.svg").read_text(), "run: make tables"


# How much there is ----------------------------------------------------------------------------------------------------


def test_pages_keep_within_their_words():
    over = {page: WORDS.words(page) for page, most in WORDS.BUDGETS.items() if WORDS.words(page) > most}
    assert over == {}
    assert sum(map(WORDS.words, WORDS.BUDGETS)) <= WORDS.TOTAL


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.stem)
def test_no_line_is_taken_for_a_comment(path):
    """MyST leaves out a line that begins with a percent sign, as a wrapped one may."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    assert [line for line in text.splitlines() if line.startswith("%")] == []


def test_the_sidebar_has_these_pages_and_the_others_stand_outside():
    groups = re.findall(
        r"```\{toctree\}\n:hidden:\n:caption: [^\n]+\n\n(.*?)```", (DOCS / "conf.py").read_text(), flags=re.DOTALL
    )
    assert ["index", *" ".join(groups).split()] == [*WORDS.BUDGETS, "api/index"]
    alone = {page for page in PAGES if (DOCS / f"{page}.md").read_text().startswith("---\norphan: true\n")}
    assert alone == {*PAGES} - {*WORDS.BUDGETS}


# Links ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.stem)
def test_links_and_pictures_lead_to_files_and_headings(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]+))?\)", text):
        page = (path.parent / target).resolve() if target else path
        assert page.exists(), target
        if anchor and page.suffix == ".md" and not anchor.startswith("reparax."):
            headings = re.findall(r"^#+ (.*)", page.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}#{anchor}"


# Numbers in prose -----------------------------------------------------------------------------------------------------


def test_what_the_charts_are_said_to_show():
    text = said("docs/evidence.md")

    def time(task, way):
        (title,) = (each for each in RESULTS.tables["peers"] if each.partition(",")[0] == task)
        return RESULTS.ratio("peers", title, way, "by hand")

    tasks = ("weight norm", "spectral norm", "noise", "weight norm and noise", "weight dropout")
    assert "reparax takes half to three quarters for noise, dropout and norms" in text
    assert all(0.45 < time(task, "reparax") < 0.75 < 1 < time(task, "torch") for task in tasks)
    assert 0.7 < time("orthogonal", "reparax") < 0.95

    def memory(examples, way):
        return RESULTS.median("batches", f"16 layers, {examples} examples, TPU v5p: temporary MiB", way)

    assert "With few examples remat takes an eighth of the memory of apply" in text
    assert 0.11 < memory(32, "remat") / memory(32, "apply") < 0.14
    assert 1 < memory(8192, "apply") / memory(8192, "remat") < 1.1


def test_what_the_page_on_fine_tuning_says_of_its_tables():
    text, cells = said("docs/fine_tuning.md"), found("tuning", report.RESULTS)
    shares = re.findall(r"\| (\d+)% \| .*?\| ([\d,]+) \|", (DOCS / "fine_tuning.md").read_text())
    gained = sorted(int(share) for share, _ in shares if share != "100")
    assert f"Adapters get {gained[0]} to {gained[-1]} % of the gain" in text
    middle, low, high = report.hand_ratio()
    assert f"({middle:.2f}, quartiles {low:.2f} to {high:.2f})" in text
    written = (ROOT / "examples" / "smollm" / "results" / "example.txt").read_text().splitlines()
    assert [line for line in written[:6] if " ".join(line.split()) not in text] == []
    assert {len(cell["curve"][0]) for name, cell in cells.items() if ", rate " in name} == {20}


def test_what_the_page_on_models_says_of_an_agent():
    """A chain learns as well as the layer of dqn_zoo."""
    rewards = json.loads((ROOT / "benchmarks" / "results" / "noisy_agent.json").read_text())["rewards"]
    last = {name: sorted(sum(run[-5:]) / 5 for run in runs) for name, runs in rewards.items()}
    assert abs(median(last["a chain"]) - median(last["dqn_zoo's layer"])) < 0.05
    for name, runs in last.items():
        row = " | ".join(f"{x:.2f}" for x in (median(runs), runs[0], runs[-1]))
        assert f"| {name} | {row} |" in (DOCS / "api" / "models.md").read_text()


def test_costs_of_experts():
    """The table of the page on fine-tuning is what ``benchmarks/experts.py`` planned."""
    text = (DOCS / "fine_tuning.md").read_text()
    for name, rows in {"ragged_dot": "2048 rows by `ragged_dot`", "w[expert]": "256 rows by `w[expert]`"}.items():
        for what, unit in {"GFLOP": "GFLOP", "temporary MiB": "MiB"}.items():
            for suffix, device in ((", TPU v5p", "on a TPU v5p"), ("", "on a CPU")):
                title = f"LoRA on experts, {name}{suffix}: {what}"
                medians = (RESULTS.median("experts", title, way) for way in ("factored", "by hand", "apply"))
                numbers = " | ".join(f"{x:.3g}" if x < 100 else f"{x:.0f}" for x in medians)
                row = f"| {rows}, {unit} {device} | {numbers} |"
                assert row in text or f"| the same {device} | {numbers} |" in text or name == "w[expert]"
