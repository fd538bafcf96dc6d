"""Links that lead nowhere, of the built site and of the repository's Markdown: nothing is loaded from outside.

    python -m scripts.pages.links build/site

`make site` ends with it. A link or picture inside must be a file, what stands behind its `#` an anchor of it; an address outside is
judged by its form and host (`make links` asks the hosts). Sphinx warns of some of these and cannot see others: what a theme or raw HTML
links, what an included page calls by a path, a page that the site leaves out.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tyro.conf import Positional

from scripts import harness

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "packaging/presets/README.md")
"""Markdown of the repository that lies outside docs/."""
OUTSIDE = re.compile(r"https://[\w-]+(\.[\w-]+)+(:\d+)?([/?#][^\s<>\"]*)?(?<![.,;])", re.ASCII)
"""The form of an address outside."""
HOSTS = {
    "arxiv.org",
    "github.com",
    "huggingface.co",
    "storage.googleapis.com",
    "www.apache.org",
    "www.tensorflow.org",
}
"""Of addresses in documents and code: a new one is written here once somebody has looked at what it is."""
ADDRESS = re.compile(r"https?://\w[^\s<>\"'`\\|)\]{}*]*")
LOCAL = {"localhost", "127.0.0.1", "host"}
"""Hosts of what has the form of an address and is none: this machine, and a placeholder."""
NAMESPACES = {"http://www.w3.org/2000/svg"}
"""Names of a format that have the form of an address."""
FORMS = {
    "arxiv.org": re.compile(r"/abs/\d{2}(0[1-9]|1[0-2])\.\d{5}"),
    "github.com": re.compile(r"/[\w-]+/[\w.-]+(/(issues|pull)/\d+|/(tree|blob)/[\w./-]+)?/?"),
}
"""Paths that a host has."""
CHECKOUT = re.compile(r"/[\w-]+/mupax/(?:tree|blob)/[\w.-]+/([^#?]+)")
"""The path on GitHub of a file of this repository."""
TEMPLATES = "_static"
"""A folder of the site whose pages are a theme's templates."""
FENCE = re.compile(r"^ *(`{3,})[^`\n]*\n.*?^ *\1 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`)[^\n]*?[^`]\1(?!`)")
LINK = re.compile(r"\]\(<?([^)\s>]+)")


class _Page(HTMLParser):
    """Anchors of a page, and what it links or shows."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.targets += [values[name] for name in ("href", "src") if name in values]


@cache
def _page(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def _prose(text: str) -> str:
    """Markdown without its code."""
    return CODE.sub("`", FENCE.sub("", text))


@cache
def _headings(path: Path) -> set[str]:
    """Anchors that GitHub and MyST make of a document's headings; those of one text are numbered."""
    times: Counter[str] = Counter()
    anchors = set()
    for title in re.findall(r"^#+ +(.*?) *#*$", FENCE.sub("", path.read_text()), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        anchors.add(slug if not times[slug] else f"{slug}-{times[slug]}")
        times[slug] += 1
    return anchors


def _anchors(path: Path) -> set[str] | None:
    """Anchors of a file; None for one that has none to judge."""
    if path.suffix == ".html":
        return _page(path).anchors
    return _headings(path) if path.suffix == ".md" else None


def _problem(page: Path, target: str, root: Path) -> str | None:
    """What is wrong with what `page` links: nothing links out of `root`, and no page of a site shows a folder."""
    parts = urlsplit(target)
    if parts.scheme in ("data", "mailto", "javascript"):
        return None
    if parts.scheme or parts.netloc:
        return None if OUTSIDE.fullmatch(target) else "is no address of the form https://host/path"
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not path.is_relative_to(root):
        return f"leads out of {root.name}"
    if not path.exists() or (page.suffix == ".html" and path.is_dir()):
        return "is no file"
    anchors = _anchors(path)
    if parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors:
        return "is no anchor"
    return None


def _problems(page: Path, targets: Sequence[str], root: Path) -> Iterator[str]:
    for target in dict.fromkeys(targets):
        if problem := _problem(page, target, root):
            yield f"{page.relative_to(root)}: {target} {problem}"


def pages_of(folder: Path) -> list[Path]:
    """Pages of a built site, without a theme's templates.

    Raises:
        FileNotFoundError: there is no site.
    """
    pages = sorted(
        path for path in folder.rglob("*.html") if path.relative_to(folder).parts[0] != TEMPLATES
    )
    if not pages:
        raise FileNotFoundError(f"{folder} holds no page; build the site first: make site")
    return pages


def broken_in_site(folder: Path) -> list[str]:
    """Page, target and what is wrong, of every link and picture of a built site that leads nowhere.

    Raises:
        FileNotFoundError: there is no site.
    """
    folder = folder.resolve()
    return [
        line for page in pages_of(folder) for line in _problems(page, _page(page).targets, folder)
    ]


def broken_in_documents(root: Path = ROOT) -> list[str]:
    """Page, target and what is wrong, of every link of the repository's Markdown that leads nowhere, as GitHub would show it."""
    documents = [root / name for name in DOCUMENTS if (root / name).exists()] + sorted(
        (root / "docs").rglob("*.md")
    )
    root = root.resolve()
    return [
        line
        for path in documents
        for line in _problems(path.resolve(), LINK.findall(_prose(path.read_text())), root)
    ]


def wrong_address(address: str, root: Path = ROOT) -> str | None:
    """What is wrong with an address outside, as far as can be known without asking for it; None where nothing is.

    Args:
        address: the address.
        root: of the repository, whose own files an address on GitHub may name.
    """
    if urlsplit(address).hostname in LOCAL or address in NAMESPACES:
        return None
    if not OUTSIDE.fullmatch(address):
        return "is no address of the form https://host/path"
    parts = urlsplit(address)
    if parts.netloc not in HOSTS:
        return f"has a host that no other address has; if {parts.netloc} is right, write it into HOSTS of scripts/pages/links.py"
    if parts.netloc in FORMS and not FORMS[parts.netloc].fullmatch(parts.path):
        return f"has no path of {parts.netloc}, such as /abs/2405.15712, /OWNER/NAME or /OWNER/NAME/issues/1"
    if (
        parts.netloc == "github.com"
        and (inside := CHECKOUT.fullmatch(parts.path))
        and not (root / inside[1]).exists()
    ):
        return "is no file of this repository"
    return None


def wrong_addresses(texts: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """Path, address and what is wrong, of every address outside that cannot be right.

    Args:
        texts: path to text, of documents and code.
        root: as `wrong_address`.
    """
    return [
        f"{path}: {address} {problem}"
        for path, text in texts.items()
        for address in dict.fromkeys(hit.rstrip(".,;:") for hit in ADDRESS.findall(text))
        if (problem := wrong_address(address, root))
    ]


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    site: Positional[Path]
    """The folder of the built site."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what leads nowhere; 1 where there is any, 2 where there is no site."""
    site: Path = harness.parse(Options, argv).site
    try:
        broken = broken_in_site(site) + broken_in_documents()
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(broken) or f"every link of {site} and of the documents leads somewhere")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
