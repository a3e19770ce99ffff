"""How Sphinx builds the site. `scripts/docs` runs it."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from _site import api, cells, config_fields, facts, mathml  # noqa: E402

import lbopt  # noqa: E402

NOTEBOOKS = ROOT / "build" / "notebooks" / facts.revision()
FILES = NOTEBOOKS / "files"  # what notebooks leave for the site
FILES.mkdir(parents=True, exist_ok=True)
os.environ["LBOPT_SITE_FILES"] = str(FILES)

project = "lbopt"
author = "The lbopt authors"
copyright = "2026, The lbopt authors"
version = release = lbopt.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_site"]
suppress_warnings = ["myst.header"]  # a page that includes another one begins at its second level
nitpicky = False

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_cache_path = str(NOTEBOOKS / "cache")
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False  # `_site.api.signature` writes them
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

html_title = "lbopt"
html_theme = "sphinx_book_theme"
html_theme_options = {
    "repository_url": "https://github.com/lbopt/lbopt",
    "use_repository_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "navbar_persistent": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}  # follows the reader's system
html_static_path = ["_static"]
html_extra_path = [str(FILES)]
html_css_files = ["site.css"]
html_js_files = ["filter.js"]
html_copy_source = False
html_show_sourcelink = False
html_last_updated_fmt = None
html_math_renderer = "mathml"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    """Add what is the site's own: facts from files, cells to paste, and formulas as MathML."""
    app.connect("source-read", facts.fill_in)
    api.setup(app)
    cells.setup(app)
    config_fields.setup(app)
    mathml.setup(app)
