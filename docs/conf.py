"""Configuration of the site: `make docs` builds it offline, and every warning is an error."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import manyheads

project = "manyheads"
author = "The manyheads developers"
copyright = author
version = release = manyheads.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # MathJax as files of the site: formulas need no network
    "numpydoc",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "api_pages",
    "gallery_pages",
    "coverage_verdicts",
    "llms_page",
    "performance_page",
    "families_page",
    "results_page",
]
exclude_patterns = ["_build", "gallery/*.json"]
nitpicky = False
suppress_warnings = ["mystnb.unknown_mime_type"]

# Pages are MyST; notebooks are executed once and then taken from the cache below _build.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parent / "_build" / "notebooks")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
math_number_all = False
math_numfig = False

autodoc_typehints = "none"  # docstrings give types and shapes
autodoc_member_order = "bysource"
default_role = "code"  # single backticks in docstrings are code
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "manyheads"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "header_links_before_dropdown": 6,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
html_context = {"default_mode": "auto"}
html_sidebars = {"index": [], "compare": []}

OUTSIDE = {  # files of the repository that are pages of the site
    "../NOTEBOOK.md": "notebook.md",
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
}


def _link_inside(app, docname, source):
    """Turn links to files of the repository into links to their pages."""
    for place, page in OUTSIDE.items():
        source[0] = source[0].replace(f"]({place})", f"]({page})")


def setup(app):
    """Register the hook on sources."""
    app.connect("source-read", _link_inside)
