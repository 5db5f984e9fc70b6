"""How Sphinx renders the site; docs/site/make_site.py (`make docs`) lays out the pages and calls it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from make_site import as_rst

from evenhand import __version__

project = "evenhand"
author = "The evenhand authors"
copyright = "the evenhand authors; Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page of results may begin below the first level
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = "evenhand"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00597d", "color-brand-content": "#00597d"},
    "dark_css_variables": {"color-brand-primary": "#5cb8e4", "color-brand-content": "#5cb8e4"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def _docstring(app: object, what: str, name: str, object_: object, options: object, lines: list[str]) -> None:
    lines[:] = as_rst("\n".join(lines)).splitlines()


def setup(app: object) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _docstring)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
