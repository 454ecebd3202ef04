"""The built pages, in a browser: `make docs` builds them and runs this."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

SITE = Path(__file__).parents[2] / "docs" / "_build" / "html"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HIDDEN = {"_modules", "_static"}
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if not HIDDEN & {*path.parts})
OFFLINE = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
READABLE = (Path(__file__).parent / "readable.js").read_text()
"""How light a picture of the screen is, from 0 to 255."""
OURS = [page for page in PAGES if page not in ("genindex.html", "search.html", "py-modindex.html")]


def test_the_pages_are_built():
    assert "index.html" in PAGES, "Run make docs."


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no Chromium is installed here")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=OFFLINE)
        yield started
        started.close()


@pytest.fixture(scope="module", params=[1400, 420])
def window(browser, request) -> Iterator[Any]:
    opened = browser.new_page(viewport={"width": request.param, "height": 900})
    opened.route(re.compile("^https?:"), lambda route: route.abort())  # no page needs a network
    yield opened
    opened.close()


@pytest.fixture(scope="module", params=OURS)
def in_window(window, request) -> Any:
    """A page, which is loaded once for all tests of it."""
    window.goto((SITE / request.param).as_uri())
    return window


def answer(opened: Any, question: str) -> Any:
    """What `readable.js` says of the page that is open."""
    return opened.evaluate(f"{READABLE.strip().removesuffix(';')}.{question}()")


def test_formulas_are_drawn_without_a_network(in_window):
    text = in_window.inner_text("article")
    assert not re.search(r"\\(frac|bmod|text|sqrt|alpha|sigma|lVert|mathbb|operatorname)\b", text)
    sizes = in_window.evaluate(
        "[...document.querySelectorAll('article math')].map(e => e.getBoundingClientRect().height)"
    )
    assert all(size > 4 for size in sizes)


def test_code_of_notebooks_is_not_wrapped_nor_columns_on_a_phone_and_nothing_ends_with_an_empty_line(in_window):
    assert answer(in_window, "wrappedCode") == []
    assert answer(in_window, "emptyLastLines") == []


def test_code_that_is_copied_is_what_stands_there(in_window):
    """Each of its lines is an element, which is indented more where it has to wrap."""
    assert answer(in_window, "copiedOtherwise") == []


def links(page: str) -> set[str]:
    text = (SITE / page).read_text()
    return {unquote(link) for link in re.findall(r'(?:href|src)="([^"]+)"', text)}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for link in links(page):
        path, anchor = urldefrag(link)
        if re.match(r"[a-z]+:", link) or link == "#":
            continue
        target = (SITE / page).parent / path.split("?")[0] if path else SITE / page
        assert target.exists(), link
        if anchor and target.suffix == ".html" and "_modules" not in target.parts:
            assert re.search(rf'id="{re.escape(anchor)}"', target.read_text()), link


@pytest.mark.parametrize("page", OURS)
def test_pages_show_nothing_of_the_machine_that_built_them(page):
    text = (SITE / page).read_text()
    article = text[text.index("<article") : text.index("</article>")]
    shown = re.sub(r"<[^>]+>", "", article)
    assert not re.search(r"/(?:home|root|work|usr|tmp|opt)/\S", shown)
    assert not re.search(r"\breparax(\.\w+)*\._\w+", shown)
    assert not re.search(r"0x[0-9a-f]{8,}", shown)


def test_parameters_say_their_types():
    pages = [(SITE / page).read_text() for page in PAGES if page.startswith("api/")]
    shown = [re.sub(r"<[^>]+>", "", page) for page in pages]
    assert any("rank (int) " in page for page in shown)
    assert not any(re.search(r"\w \(Any\) \W ", page) for page in shown)


@pytest.mark.parametrize(
    "page", [page for page in OURS if page.startswith("notebooks/")] + ["choosing.html", "coming_from.html"]
)
def test_pages_link_to_the_descriptions_of_what_they_name(page):
    text = (SITE / page).read_text()
    assert re.search(r'href="[./]*api/\w+\.html#reparax\.\w+', text[text.index("<article") : text.index("</article>")])


def test_each_stage_of_a_chain_leads_to_its_own_description():
    text = (SITE / "concepts.html").read_text()
    stages = r'<a [^>]*#reparax\.sparse\.Freeze".{1,200}</a>.{1,60}&gt;&gt;.{1,60}<a [^>]*#reparax\.adapters\.LoRA"'
    assert re.search(stages, text)
    assert "numbers.html#reparax.numbers.Bounded" in (SITE / "choosing.html").read_text()
    assert "#reparax.stage.fixed" not in (SITE / "quickstart.html").read_text()


FIRST = {"lora": "adapters", "weight norm": "norms", "freeze": "sparse", "spectral": "norms"}


@pytest.mark.parametrize("words", FIRST)
def test_search_finds_first_what_belongs_first(browser, words):
    opened = browser.new_page()
    opened.goto(f"{(SITE / 'search.html').as_uri()}?q={words}")
    opened.wait_for_selector("#search-results ul.search li a", timeout=20_000)
    opened.wait_for_timeout(1000)
    found = [link.get_attribute("href") for link in opened.query_selector_all("#search-results ul.search li > a")]
    opened.close()
    assert any(f"api/{FIRST[words]}.html" in link for link in found[:3]), found[:6]
