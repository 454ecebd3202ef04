"""The built pages, in a browser: `make docs` builds them and runs this."""

import base64
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
SHADE = """async (shot) => {
  const picture = new Image();
  picture.src = `data:image/png;base64,${shot}`;
  await picture.decode();
  const canvas = Object.assign(document.createElement("canvas"), {width: 4, height: 4}).getContext("2d");
  canvas.drawImage(picture, 0, 0);
  return canvas.getImageData(1, 1, 1, 1).data[0];
}"""
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


@pytest.fixture(params=["light", "dark"])
def in_colour(in_window, request) -> Any:
    """A page that follows the machine, which changes between day and night."""
    in_window.emulate_media(color_scheme=request.param)
    in_window.wait_for_function(f"document.documentElement.dataset.theme === '{request.param}'")
    in_window.evaluate("document.getAnimations().forEach(each => each.finish())")
    return in_window


def answer(opened: Any, question: str) -> Any:
    """What `readable.js` says of the page that is open."""
    return opened.evaluate(f"{READABLE.strip().removesuffix(';')}.{question}()")


def test_no_page_is_wider_than_the_window(in_window):
    width = in_window.evaluate("document.documentElement.scrollWidth")
    wide = in_window.evaluate(
        "[...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1"
        " && !e.closest('pre, table, math, .highlight, .cell_output')).slice(0, 3).map(e => e.outerHTML.slice(0, 120))"
    )
    assert width <= in_window.viewport_size["width"], wide
    assert wide == []


def test_formulas_are_drawn_without_a_network(in_window):
    text = in_window.inner_text("article")
    assert not re.search(r"\\(frac|bmod|text|sqrt|alpha|sigma|lVert|mathbb|operatorname)\b", text)
    sizes = in_window.evaluate(
        "[...document.querySelectorAll('article math')].map(e => e.getBoundingClientRect().height)"
    )
    assert all(size > 4 for size in sizes)


def test_no_word_is_broken(in_window):
    assert answer(in_window, "brokenWords") == []


def test_code_of_notebooks_is_not_wrapped_nor_columns_on_a_phone_and_nothing_ends_with_an_empty_line(in_window):
    assert answer(in_window, "wrappedCode") == []
    assert answer(in_window, "emptyLastLines") == []


def test_code_that_is_copied_is_what_stands_there(in_window):
    """Each of its lines is an element, which is indented more where it has to wrap."""
    assert answer(in_window, "copiedOtherwise") == []


def test_no_table_of_words_is_wider_than_the_window(in_window):
    assert answer(in_window, "tablesThatScroll") == []


def test_text_in_pictures_is_large_enough(in_window):
    """That of a chart is of 8 to 12 points, at 100 dots an inch; that of a drawing says its size."""
    for address, scale in answer(in_window, "pictures"):
        path = SITE / unquote(address.removeprefix(SITE.as_uri() + "/"))
        if path.suffix == ".svg":
            text = path.read_text()
            sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)', text)]
            sizes += [float(points) * 4 / 3 for points in re.findall(r"font(?:-size)?: ([\d.]+)px", text)]
            assert min(sizes) * scale >= 11, address
        else:
            assert 8 / 72 * 100 * scale >= 11, address


@pytest.mark.parametrize("window", [1400], indirect=True)
def test_text_and_code_have_contrast_on_light_and_on_dark_pages(in_colour):
    assert answer(in_colour, "faint") == []


@pytest.mark.parametrize("window", [1400], indirect=True)
def test_charts_are_dark_on_dark_pages(in_colour):
    """A chart is drawn on white."""
    chart = in_colour.locator("article img").first
    if chart.count():
        dark = in_colour.evaluate("document.documentElement.dataset.theme") == "dark"
        chart.scroll_into_view_if_needed()
        corner = {**chart.bounding_box(), "width": 4, "height": 4}
        shot = base64.b64encode(in_colour.screenshot(clip=corner)).decode()
        shade = in_colour.evaluate(SHADE, shot)
        assert (shade < 64) == dark, shade


def test_a_page_that_is_opened_at_night_is_dark(browser):
    context = browser.new_context(color_scheme="dark")
    opened = context.new_page()
    opened.route(re.compile("^https?:"), lambda route: route.abort())
    opened.goto((SITE / "index.html").as_uri())
    assert opened.evaluate("document.documentElement.dataset.theme") == "dark"
    context.close()


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


@pytest.mark.parametrize("page", OURS)
def test_no_table_is_shown_as_its_source(page):
    text = (SITE / page).read_text()
    article = re.sub(r"<pre>.*?</pre>", "", text[text.index("<article") : text.index("</article>")], flags=re.DOTALL)
    assert not re.search(r"\|\s*(?:-|\u2013|\u2014){1,3}\s*\|", re.sub(r"<[^>]+>", "", article))


@pytest.mark.parametrize("page", OURS)
def test_pictures_say_what_they_show(page):
    text = (SITE / page).read_text()
    article = text[text.index("<article") : text.index("</article>")]
    for picture in re.findall(r"<img[^>]*>", article):
        alt = re.search(r'alt="([^"]*)"', picture)
        assert alt, picture
        assert len(alt[1]) > 20, picture
        assert "_images" not in alt[1], picture  # a path stands for an alt text that is missing


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
