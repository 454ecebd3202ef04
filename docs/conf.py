"""Sphinx: pages in Markdown, notebooks that run when the pages are built, and docstrings of the package."""

import os
import re
from importlib.metadata import metadata
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.addnodes import pending_xref
from sphinx.util import logging
from sphinx.util.console import strip_escape_sequences

import reparax

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

# Text that a reader copies holds the code alone; what private module a name stands in is nobody's business.
add_module_names = False
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


NAME = re.compile(r"(?:rpx\.)?(\w+)(?:\(.*\))?|p\.(\w+)(?:\(.*\))?")


def link_names(app, doctree):
    """Makes each name of the library in running text a link to its description."""
    page = app.env.docname
    if page.startswith("api/"):  # whose docstrings say where they link to
        return
    for literal in list(doctree.findall(nodes.literal)):
        match = NAME.fullmatch(literal.astext())
        name, method = match.groups() if match else (None, None)
        target = name if name in vars(reparax) else f"Parametrization.{method}" if method else None
        if target and not isinstance(literal.parent, nodes.reference | nodes.title | pending_xref):
            link = pending_xref(refdomain="py", reftype="obj", reftarget=f"reparax.{target}", refdoc=page)
            literal.replace_self(link)
            link += literal


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
    app.connect("env-updated", name_failures)
    app.connect("doctree-read", link_names)
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("object-description-transform", without_any, priority=900)
