"""The site's settings: `make site` builds it, with notebooks executed and warnings as errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mupax import __version__  # noqa: E402

# Of the notebooks' kernels.
os.environ["PYTHONPATH"] = str(ROOT)
os.environ["MUPAX_DOCS"] = str(ROOT / "docs")
os.environ["JAX_PLATFORMS"] = "cpu"

project = "mupax"
author = "The mupax authors"
copyright = author
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
default_role = "code"
exclude_patterns = ["_build"]
suppress_warnings = ["ref.python"]  # two classes have a field of one name, and a sentence says that name

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

nb_execution_mode = os.environ.get("NOTEBOOKS", "cache")
nb_execution_cache_path = str(ROOT / ".cache" / "site")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_render_markdown_format = "gfm"  # tables, too

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "sphinx_book_theme"
html_title = "mupax"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
    "navbar_persistent": [],
}
