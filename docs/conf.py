"""Sphinx: pages in Markdown, notebooks that run when the pages are built, and docstrings of the package."""

import itertools
import os
import re
import tempfile
from importlib.metadata import metadata
from importlib.metadata import version as version_of
from pathlib import Path

from bs4 import BeautifulSoup, NavigableString
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.addnodes import desc_addname, pending_xref
from sphinx.util import logging
from sphinx.util.console import strip_escape_sequences

from reparax.core.names import family_by_name

project = "reparax"
author = "the reparax authors"
release = version = version_of("reparax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

# Text that a reader copies holds the code alone.
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_display_short_literal_types = True
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_attr_annotations = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # pages show what `benchmarks` and `examples` have on file
quiet = tempfile.TemporaryDirectory()  # each kernel would warn that it talks by TCP
Path(quiet.name, "profile_default").mkdir()
Path(quiet.name, "profile_default", "ipython_kernel_config.py").write_text(
    'get_config().IPKernelApp.log_level = "ERROR"\n'
)
os.environ["IPYTHONDIR"] = quiet.name
nb_execution_mode = "force"
nb_execution_timeout = 3600  # seconds for a cell, of which none needs more than one minute: this ends what hangs
nb_execution_raise_on_error = False
suppress_warnings = ["mystnb.exec"]  # as `name_failures` says more
nb_merge_streams = True

autosummary_generate = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
viewcode_line_numbers = True

html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["reparax.css"]
html_theme = "sphinx_book_theme"
html_title = f"reparax {version}"
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
}
ADDRESS = dict(line.split(", ", 1) for line in metadata("reparax").get_all("Project-URL", [])).get("Source")
if ADDRESS:
    html_theme_options |= {"repository_url": ADDRESS, "use_repository_button": True}
html_show_sourcelink = False
html_copy_source = False


def formula(translator, node):
    """Writes a formula as MathML, which a reader needs no network for."""
    block = isinstance(node, nodes.math_block)
    written = convert(node.astext(), display="block" if block else "inline")
    translator.body.append(f"<p>{written}</p>" if block else written)
    raise nodes.SkipNode


def without_any(app, domain, kind, content):
    """Leaves out the type ``Any``, which is that of a tree: it says nothing."""
    for field in list(content.findall(nodes.field)):
        name, body = field.children
        if name.astext().split(" ")[0] in ("type", "rtype") and body.astext().endswith("typing.Any"):
            field.parent.remove(field)


NUMBER = re.compile(r"\S*FieldOf\[.*Callable\[\[str, \S*Any\], \S*Any\]( \| .*)?\]")


def name_numbers(app, domain, kind, content):
    """Calls the type of a number by its name, in place of the ten types that it stands for; any arguments are dots."""
    for field in content.findall(nodes.field):
        name, body = field.children
        if name.astext().startswith("type ") and (match := NUMBER.fullmatch(body.astext())):
            body[:] = [nodes.paragraph("", f"Number{match[1] or ''}")]
        elif "[~P]" in body.astext():
            body[:] = [nodes.paragraph("", body.astext().replace("[~P]", "..."))]


SIDEBAR = """
```{toctree}
:hidden:
:caption: Learn

quickstart
concepts
recognizer
fine_tuning
gallery
```

```{toctree}
:hidden:
:caption: Choose and use

choosing
selecting
training
recipes
own_stage
```

```{toctree}
:hidden:
:caption: Evaluate

evidence
coming_from
returnn
questions
```

```{toctree}
:hidden:
:caption: Reference

api/index
```
"""


def add_sidebar(app, page, source):
    """Appends the lists of pages to the home page, which is read in a repository without them."""
    if page == "index":
        source[0] += SIDEBAR


NAME = re.compile(r"(rpx\.)?(?:(\w+)\.)?(\w+)(?:\(.*\))?")
PLACES = {name: f"{family}.{name}" for name, family in family_by_name().items()}
"""Where each public name is described."""
WRAPPERS = {"nnx", "linen", "equinox", "haiku"}
"""Families whose names several of them have."""
WORDS = {"main", "aux", "fixed", "field"}
"""Names that are words of tables and trees too."""


def place_of(code):
    """Where a name, a call or a method of a chain is described; None for all other code."""
    match = NAME.fullmatch(code)
    if match is None or code in WORDS:
        return None
    ours, family, name = match.groups()
    if family == "p":
        return f"stage.Parametrization.{name}"
    if ours and family in WRAPPERS:
        return f"{family}.{name}"
    place = PLACES.get(name)
    return place if place and family in (None, place.partition(".")[0]) else None


def link_names(app, doctree):
    """Makes each name of the library in running text a link to its description, and in a chain each stage."""
    page = app.env.docname
    if page.startswith("api/") and page != "api/index":  # whose docstrings say where they link to
        return
    for literal in list(doctree.findall(nodes.literal)):
        if isinstance(literal.parent, nodes.reference | nodes.title | pending_xref):
            continue
        pieces = re.split(r"( >> )", literal.astext())
        if any(map(place_of, pieces)):
            literal[:] = [linked(piece, place_of(piece), page) for piece in pieces]


def linked(code, place, page):
    """A piece of code, as a link if it has a place."""
    if place is None:
        return nodes.Text(code)
    link = pending_xref(refdomain="py", reftype="obj", reftarget=f"reparax.{place}", refdoc=page)
    link += nodes.inline("", code)
    return link


def find_by_name(app, env, node, content):
    """Where a docstring links to a name of another family."""
    name, dot, member = node.get("reftarget", "").removeprefix("reparax.").partition(".")
    if node.get("refdomain") == "py" and name in PLACES:
        target = f"reparax.{PLACES[name]}{dot}{member}"
        return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)
    return None


def as_written(app, domain, kind, content):
    """Shows a name as users write it, ``rpx.norms.WeightNorm``."""
    for prefix in list(content.parent.findall(desc_addname)):
        if prefix.astext().startswith("reparax.") and not prefix.astext().startswith("reparax.testing."):
            prefix[:] = [nodes.Text(prefix.astext().replace("reparax.", "rpx.", 1))]


def without_empty_last_lines(app, doctree):
    """Examples end with an empty line in the source, which their doctests need; readers do not."""
    for block in doctree.findall(nodes.literal_block):
        text = block.astext().rstrip("\n")
        block.rawsource, block.children = text, [nodes.Text(text)]


LONG_WORD = re.compile(r"\S{28,}")  # which may not fit into a line on a phone
BREAK = re.compile(r"(?<=[\w\])}])(?=\.[^\W\d])|(?<=[(\[{])(?=[^)\]}])|(?<=[_/=,:])(?=[@\w\"'({\[])")
COLUMNS = re.compile(r"(?<=\S)(?<!^\.\.\.) {2,}[^\s#]", flags=re.MULTILINE)  # comments and indented lines are none
NUMBERS = re.compile(r"[\d\s.,±%()-]*")
INDENT = re.compile(r"(?:>>> |\.\.\. )?\s*")
WITH_NUMBER = re.compile(r"(?<=±) |(?<=\d) (?=%|(?:dB|[KMG]i?B|ms)\b)|(?<=\bp) (?=[=<] \d)|(?<=\bp [=<]) (?=\d)")
RANGE = re.compile(r"(\(?[\d.,]+ to [\d.,]+\)?)")
PICTURE = re.compile(r"(?<=!\[)[^\]]+(?=\]\()")


def in_one_line(app, page, source):
    """Joins the lines of what a picture's text says, of which two would come out as one word."""
    source[0] = PICTURE.sub(lambda text: " ".join(text[0].split()), source[0])


def let_break(soup, code):
    """Marks where long words of code may break: in front of dots, and after brackets, underscores and slashes."""
    strings = list(code.find_all(string=True))
    text, start = "".join(strings), 0
    places = {place.start() for word in LONG_WORD.finditer(text) for place in BREAK.finditer(text, *word.span())}
    for string in strings:
        end = start + len(string)
        cuts = [start, *sorted(place for place in places if start < place < end), end]
        pieces = [NavigableString(text[a:b]) for a, b in itertools.pairwise(cuts)]
        marked = [each for piece in pieces for each in (soup.new_tag("wbr"), piece)]
        string.replace_with(*marked[start not in places :])
        start = end


def hang(soup, block):
    """Says how far each line of code is indented: where one has to wrap, what follows is indented more."""
    lines = [[]]
    for node in list(block.children):
        first, *others = node.split("\n") if isinstance(node, NavigableString) else [node]
        lines[-1].append(node.extract() if first is node else NavigableString(first))
        lines.extend([NavigableString(other)] for other in others)
    block.clear()
    for number, line in enumerate(lines):
        text = "".join(part.get_text() for part in line)
        held = soup.new_tag("span", attrs={"class": "line", "style": f"--indent: {INDENT.match(text).end()}"})
        held.extend(line)
        block.extend(["\n"] * (number > 0) + [held] * bool(text.strip()))


def label_cells(table):
    """Names the column in each cell of a table of words, which stands as a list on a phone."""
    heads = [head.get_text(" ", strip=True) for head in table.select("thead th")]
    if heads and not any(heads):  # an empty bar
        table.thead.decompose()
        table["class"] = [*table.get("class", []), "headless"]
    rows = [row.find_all("td", recursive=False) for row in table.select("tbody tr")]
    cells = [cell.get_text(" ", strip=True) for row in rows for cell in row[1:]]
    if "class" in table.attrs and sum(NUMBERS.fullmatch(cell) is None for cell in cells) > len(cells) / 2:
        table["class"] = [*table["class"], "words"]
        for row in rows:
            for head, cell in zip(heads[1:], row[1:], strict=False):
                cell["data-head"] = head
                if not cell.get_text(strip=True):
                    cell.clear()
            if len(row) > 1 and not any(cell.contents for cell in row[1:]):  # a heading within the table
                row[0]["colspan"] = len(row)
                for cell in row[1:]:
                    cell.decompose()
    elif "class" in table.attrs:
        table["class"] = [*table["class"], "numbers", *["many"] * (len(heads) > 5)]


def keep_together(soup):
    """Keeps numbers with their signs and units, and ranges in one piece."""
    for text in soup.find_all(string=WITH_NUMBER):
        if not text.find_parent(["pre", "code", "math"]):
            text.replace_with(NavigableString(WITH_NUMBER.sub("\u00a0", text)))
    for text in [text for table in soup.select("table.numbers") for text in table.find_all(string=RANGE)]:
        for place, piece in enumerate(RANGE.split(text)):
            held = NavigableString(piece)
            text.insert_before(held)
            if place % 2:
                held.wrap(soup.new_tag("span", attrs={"class": "range"}))
        text.extract()


def for_phones(app, page, template, context, doctree):
    """What a page needs to be read on a narrow screen."""
    if doctree is None:  # an index, or the source of a module
        return
    soup = BeautifulSoup(context["body"], "html.parser")
    for table in soup.find_all("table"):
        label_cells(table)
    keep_together(soup)
    for code in soup.select("pre, :not(pre) > code, dt.sig, div.text_html td"):
        if len(COLUMNS.findall(code.get_text())) >= 6:
            code["class"] = [*code.get("class", []), "columns"]
        else:
            let_break(soup, code)
            if code.name == "pre":
                hang(soup, code)
    context["body"] = str(soup)


def why(run, limit):
    """Why a page could not be run, in a few words."""
    if run["error"] == "CellTimeoutError":
        return f"one of its cells took longer than {limit} seconds, which is nb_execution_timeout"
    return strip_escape_sequences(run["traceback"]).strip().splitlines()[-1].removesuffix(".")


def name_failures(app, env):
    """Names each page that could not be run in a warning, which fails the build when all other pages are written."""
    runs = {page: data["exec_data"] for page, data in env.nb_metadata.items() if data.get("exec_data")}
    for page in sorted(page for page, run in runs.items() if not run["succeeded"]):
        report = Path(app.outdir, "reports", f"{page}.err.log")
        message = "this page could not be run: %s. The traceback is in %s."
        reason = why(runs[page], app.config.nb_execution_timeout)
        logging.getLogger(__name__).warning(message, reason, os.path.relpath(report), location=page)


def setup(app):
    """Registers how formulas, types and names are written."""
    app.connect("source-read", add_sidebar)
    app.connect("env-updated", name_failures)
    app.connect("source-read", in_one_line)
    app.connect("doctree-read", without_empty_last_lines)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", find_by_name)
    app.connect("html-page-context", for_phones)
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("object-description-transform", without_any, priority=900)
    app.connect("object-description-transform", name_numbers, priority=900)
    app.connect("object-description-transform", as_written)
