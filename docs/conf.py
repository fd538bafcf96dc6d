"""The site's settings: `make site` builds it, with notebooks executed and warnings as errors."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import posixpath
import re
import shutil
import sys
import typing
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mupax import __version__  # noqa: E402
from scripts.pages import papers  # noqa: E402

# Of the notebooks' kernels.
os.environ["PYTHONPATH"] = str(ROOT)
os.environ["MUPAX_DOCS"] = str(ROOT / "docs")
os.environ["JAX_PLATFORMS"] = "cpu"

READ = (
    "mupax",
    "presets",
    "zoo",
    "train",
    "examples",
    "scripts/launch",
    "docs/notebooks/commands.py",
    "docs/howto/launch.md",
    "requirements-site.txt",
)
"""What notebooks run and read."""


def _outputs() -> Path:
    """The folder of the notebooks' outputs: a new one whenever a file changes that they run or read, and only that one is kept."""
    files = {
        path for name in READ for path in (ROOT / name, *(ROOT / name).rglob("*")) if path.is_file()
    }
    digest = hashlib.sha256()
    for path in sorted(files):
        if path.suffix != ".pyc":
            digest.update(
                f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes()
            )
    folder = ROOT / ".cache" / "site" / digest.hexdigest()[:16]
    if not folder.is_dir():
        shutil.rmtree(folder.parent, ignore_errors=True)
    return folder


project = "mupax"
author = "The mupax authors"
copyright = author
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
default_role = "code"
exclude_patterns = ["_build"]
suppress_warnings = [
    "ref.python"
]  # two classes have a field of one name, and a sentence says that name

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

nb_execution_mode = os.environ.get("NOTEBOOKS", "cache")
if nb_execution_mode == "cache":
    nb_execution_cache_path = str(_outputs())
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_render_markdown_format = "gfm"  # tables, too

linkcheck_anchors = False  # GitHub makes its own with a script
linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1)[:/]"]
linkcheck_workers = 2  # a host that is asked too fast refuses

toc_object_entries_show_parents = "hide"  # else they are cut at the edge of the window
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_numpy_docstring = False

html_theme = "sphinx_book_theme"
html_title = "mupax"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
    "navbar_persistent": [],
}
html_static_path = ["site.css"]
html_css_files = ["site.css"]

NAMED = re.compile(rf"docs/(?P<page>\w+/\w+)\.md|{papers.NUMBER.pattern}")
"""What a sentence may name without a link."""
SHORT, LONG = 14, 32
"""Characters up to which a table's cell is not broken over lines, and from which it is at least some words wide."""


def _anchors(_: Sphinx, page: nodes.document) -> None:
    """Gives what is documented by its public name an anchor of its module's, to which the source listing leads back."""
    for signature in page.findall(addnodes.desc_signature):
        public = sys.modules.get(signature.get("module", ""))
        first, *rest = signature.get("fullname", "").split(".")
        anchor = ".".join(
            [getattr(getattr(public, first, None), "__module__", None) or "", first, *rest]
        )
        if anchor not in signature["ids"]:
            signature["ids"].append(anchor)


def _enlarged(app: Sphinx, page: nodes.document, name: str) -> None:
    """Makes every picture a link to itself in its full size."""
    for picture in list(page.findall(nodes.image)):
        kept = app.env.images.get(picture["uri"])
        if kept and not isinstance(picture.parent, nodes.reference):
            link = nodes.reference(
                "", "", internal=True, refuri="../" * name.count("/") + f"_images/{kept[1]}"
            )
            picture.replace_self(link)
            link += picture


def _attribute(
    _: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Gives a field's first line back what stands before its colon, which napoleon took for a type."""
    types = [line for line in lines if line.startswith(":type: ")]
    if what in ("attribute", "property") and types:
        lines.remove(types[0])
        lines[0] = f"{types[0].removeprefix(':type: ')}: {lines[0]}"


def _signature(
    _: Sphinx, what: str, name: str, value: object, *rest: object
) -> tuple[str, str] | None:
    """A config without its signature, which says every default of every field again, and with types without the command line's part."""
    if not dataclasses.is_dataclass(value) or not name.startswith("mupax.train."):
        return None
    value.__annotations__ = typing.get_type_hints(value)
    return "", ""


def _cells(_: Sphinx, page: nodes.document, name: str) -> None:
    """Marks cells that stay on one line, such as 1.3e-3 and 55 of 55, and those that need room, else one word a line in a narrow window."""
    for cell in page.findall(nodes.entry):
        length = len(cell.astext())
        cell["classes"] += ["short"] * (length <= SHORT) + ["long"] * (length >= LONG)


def _titles(app: Sphinx, page: nodes.document, name: str) -> None:
    """Calls a page that is linked by its file's name by its title."""
    for link in page.findall(nodes.reference):
        if link.astext().endswith(".md"):
            target = posixpath.join(
                posixpath.dirname(name), link.get("refuri", "").partition("#")[0]
            )
            title = app.env.titles.get(posixpath.normpath(target).removesuffix(".html"))
            if title is not None:
                link.children = [nodes.inline("", title.astext())]


def _addresses(app: Sphinx, page: nodes.document) -> None:
    """Links what a sentence names without a link: an arXiv number its paper, and docs/FOLDER/NAME.md the page of it."""
    skipped = (
        nodes.reference,
        addnodes.pending_xref,
        nodes.literal,
        nodes.literal_block,
        nodes.title,
        nodes.comment,
        nodes.raw,
    )
    for text in list(page.findall(nodes.Text)):
        at, parts, words, end = text.parent, [], str(text), 0
        while at is not None and not isinstance(at, skipped):
            at = at.parent
        for hit in () if at is not None else NAMED.finditer(words):
            if hit["page"] in app.env.found_docs:
                link = addnodes.pending_xref(
                    "",
                    reftype="doc",
                    refdomain="std",
                    reftarget=f"/{hit['page']}",
                    refdoc=app.env.docname,
                    refexplicit=True,
                )
                link += nodes.inline("", hit[0])
            elif hit[0] in papers.PAPERS:
                link = nodes.reference("", hit[0], internal=False, refuri=papers.address(hit[0]))
            else:
                continue
            parts += [nodes.Text(words[end : hit.start()]), link]
            end = hit.end()
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(words[end:])])


def setup(app: Sphinx) -> None:
    """Connects what this page adds to Sphinx."""
    app.connect("doctree-read", _addresses)
    app.connect("doctree-read", _anchors)
    app.connect("autodoc-process-docstring", _attribute, priority=600)  # after napoleon
    app.connect("autodoc-process-signature", _signature)
    app.connect("doctree-resolved", _enlarged)
    app.connect("doctree-resolved", _titles)
    app.connect("doctree-resolved", _cells)
