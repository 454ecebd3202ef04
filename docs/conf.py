"""Sphinx: pages in Markdown, notebooks that run when the pages are built, and docstrings of the package."""

from importlib.metadata import version as version_of

project = "reparax"
author = "the reparax authors"
release = version = version_of("reparax")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]

# Text that a reader copies holds the code alone; what private module a name stands in is nobody's business.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_use_ivar = True

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

# Building needs no network. Pages load MathJax when they are read; without a network, formulas show as LaTeX.
html_theme = "sphinx_book_theme"
html_title = "reparax"
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
}
html_show_sourcelink = False
html_copy_source = False
