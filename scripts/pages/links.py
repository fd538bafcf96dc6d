"""Check of all links in the built site and in the repository's Markdown, without loading anything.

    python -m scripts.pages.links build/site

`make site` ends with it. A link or picture inside must be a file, and the part after `#` an anchor
of the file. An outside address is judged by its form and host; `make links` asks the hosts. Sphinx
does not see all of these: links of a theme or of raw HTML, paths in an included page, and pages
that the site leaves out.
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
"""Form of an outside address."""
HOSTS = {
    "arxiv.org",
    "github.com",
    "huggingface.co",
    "storage.googleapis.com",
    "www.apache.org",
    "www.tensorflow.org",
}
"""Hosts of addresses in documents and code. Add a new one after looking at it."""
ADDRESS = re.compile(r"https?://\w[^\s<>\"'`\\|)\]{}*]*")
"""An address in a text."""
LOCAL = {"localhost", "127.0.0.1", "host"}
"""Hosts of addresses that nobody loads: this machine, and a placeholder."""
NAMESPACES = {"http://www.w3.org/2000/svg"}
"""Namespaces of XML, which have the form of an address."""
FORMS = {
    "arxiv.org": re.compile(r"/abs/\d{2}(0[1-9]|1[0-2])\.\d{5}"),
    "github.com": re.compile(r"/[\w-]+/[\w.-]+(/(issues|pull)/\d+|/(tree|blob)/[\w./-]+)?/?"),
}
"""Host to the form of its paths."""
CHECKOUT = re.compile(r"/[\w-]+/mupax/(?:tree|blob)/[\w.-]+/([^#?]+)")
"""Path on GitHub of a file of this repository."""
TEMPLATES = "_static"
"""Folder of the site whose pages are a theme's templates."""
FENCE = re.compile(r"^ *(`{3,})[^`\n]*\n.*?^ *\1 *$", re.MULTILINE | re.DOTALL)
"""Fenced block of Markdown."""
CODE = re.compile(r"(`+)(?!`)[^\n]*?[^`]\1(?!`)")
"""Inline code of Markdown."""
LINK = re.compile(r"\]\(<?([^)\s>]+)")
"""Target of a link in Markdown."""


class _Page(HTMLParser):
    """Parser that collects the anchors of a page and the targets of its links and pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name in ("id", "name"):
                self.anchors.add(value)
            if value is not None and name in ("href", "src"):
                self.targets.append(value)


@cache
def _page(path: Path) -> _Page:
    """Return the parsed HTML file; many links lead to one page."""
    page = _Page()
    page.feed(path.read_text())
    return page


def _prose(text: str) -> str:
    """Return Markdown without its code."""
    return CODE.sub("`", FENCE.sub("", text))


@cache
def _headings(path: Path) -> set[str]:
    """Return the anchors that GitHub and MyST make of a document's headings."""
    # Headings with the same text get a number from the second on.
    times: Counter[str] = Counter()
    anchors = set()
    for title in re.findall(r"^#+ +(.*?) *#*$", FENCE.sub("", path.read_text()), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{times[slug]}" if times[slug] else slug)
        times[slug] += 1
    return anchors


def _anchors(path: Path) -> set[str] | None:
    """Return the anchors of a page or document, or `None` for another kind of file."""
    if path.suffix == ".html":
        return _page(path).anchors
    return _headings(path) if path.suffix == ".md" else None


def _problem(page: Path, target: str, root: Path) -> str | None:
    """Return the reason why a link is wrong, or `None`.

    Args:
        root: Folder that links may not leave. Pages of a site may not link a folder.
    """
    parts = urlsplit(target)
    if parts.scheme in ("data", "mailto", "javascript"):
        return None
    if parts.scheme or parts.netloc:
        return None if OUTSIDE.fullmatch(target) else "is no address of the form https://host/path"
    # A target with an anchor alone leads to its own page.
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
    """Yield page, target and reason of each wrong link of a page."""
    for target in dict.fromkeys(targets):
        problem = _problem(page, target, root)
        if problem:
            yield f"{page.relative_to(root)}: {target} {problem}"


def pages_of(folder: Path) -> list[Path]:
    """Return the pages of a built site, without a theme's templates.

    Raises:
        FileNotFoundError: The folder holds no page.
    """
    pages = []
    for path in sorted(folder.rglob("*.html")):
        if path.relative_to(folder).parts[0] != TEMPLATES:
            pages.append(path)
    if not pages:
        raise FileNotFoundError(f"{folder} holds no page; build the site first: make site")
    return pages


def broken_in_site(folder: Path) -> list[str]:
    """Return page, target and reason of each wrong link or picture of a built site.

    Raises:
        FileNotFoundError: The folder holds no page.
    """
    folder = folder.resolve()
    lines: list[str] = []
    for page in pages_of(folder):
        lines += _problems(page, _page(page).targets, folder)
    return lines


def broken_in_documents(root: Path = ROOT) -> list[str]:
    """Return document, target and reason of each wrong link of the repository's Markdown.

    Links are judged as GitHub shows the documents.
    """
    documents = [root / name for name in DOCUMENTS if (root / name).exists()]
    documents += sorted((root / "docs").rglob("*.md"))
    root = root.resolve()
    lines: list[str] = []
    for path in documents:
        targets = LINK.findall(_prose(path.read_text()))
        lines += _problems(path.resolve(), targets, root)
    return lines


def wrong_address(address: str, root: Path = ROOT) -> str | None:
    """Return the reason why an outside address is wrong, or `None`; nothing is loaded.

    Args:
        root: Repository, whose files an address on GitHub may name.
    """
    if urlsplit(address).hostname in LOCAL or address in NAMESPACES:
        return None
    if not OUTSIDE.fullmatch(address):
        return "is no address of the form https://host/path"
    parts = urlsplit(address)
    if parts.netloc not in HOSTS:
        return (
            f"has a host that no other address has; if {parts.netloc} is right, write it into "
            "HOSTS of scripts/pages/links.py"
        )
    if parts.netloc in FORMS and not FORMS[parts.netloc].fullmatch(parts.path):
        return (
            f"has no path of {parts.netloc}, such as /abs/2405.15712, /OWNER/NAME or "
            "/OWNER/NAME/issues/1"
        )
    own_file = CHECKOUT.fullmatch(parts.path)
    if parts.netloc == "github.com" and own_file and not (root / own_file[1]).exists():
        return "is no file of this repository"
    return None


def wrong_addresses(texts: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """Return path, address and reason of each wrong outside address.

    Args:
        texts: path to text, of documents and code.
        root: Repository, as in `wrong_address`.
    """
    lines = []
    for path, text in texts.items():
        # A sentence's end may follow an address.
        addresses = dict.fromkeys(match.rstrip(".,;:") for match in ADDRESS.findall(text))
        for address in addresses:
            problem = wrong_address(address, root)
            if problem:
                lines.append(f"{path}: {address} {problem}")
    return lines


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    site: Positional[Path]
    """Folder of the built site."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the wrong links; return 1 if there are any, 2 without a site, otherwise 0."""
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
