"""Pictures of the built site's pages in a real browser, and a check for wide pages.

    python -m scripts.pages.shots build/site build/shots --widths 1280 390 --schemes light dark

A page is one PNG per 4,000 pixels of its height. `--pages index evidence/transfer` chooses pages.
`scripts.pages.links` reads the files of the site; this command sees what a reader sees.
"""

from __future__ import annotations

import http.server
import itertools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from scripts import harness
from scripts.pages import browser, links

LOCAL = "127.0.0.1"
WINDOW_HEIGHT = 900
"""Height of the window, in pixels."""
PART_HEIGHT = 4000
"""Height of a page's piece in one file, in pixels."""
OVERLAP = 60
"""Height by which two pieces overlap, in pixels: the bar on top of a page hides it."""
SCHEMES = ("light", "dark")
# Scripts that run in the page.
LOADED = "document.readyState == 'complete' && document.fonts.ready.then(() => true)"
SCROLLED = """new Promise(done => {
  window.scrollTo({top: %d, behavior: 'instant'});
  requestAnimationFrame(() => requestAnimationFrame(done));
})"""
MEASURES = """(() => {
  for (const image of document.images) image.loading = 'eager';
  const waits = [...document.images].map(image => image.decode().catch(() => null));
  return Promise.all(waits).then(() => {
    const width = window.innerWidth, root = document.documentElement;
    const scrolls = node => getComputedStyle(node).overflowX != 'visible';
    const inside = node => {
      while ((node = node.parentElement) && node != document.body) if (scrolls(node)) return true;
    };
    const past = [...document.body.querySelectorAll('*')].filter(node =>
      node.getBoundingClientRect().right > width + 1
      && getComputedStyle(node).position != 'fixed' && !inside(node));
    const lost = [...document.images].filter(image => !image.naturalWidth);
    return {
      width: root.scrollWidth, height: root.scrollHeight,
      widest: past.length ? past.at(-1).outerHTML.slice(0, 80) : '',
      missing: lost.map(image => image.getAttribute('src')),
    };
  });
})()"""
"""Script for the size of a page in pixels, its widest element, and pictures that did not load."""


def pages(site: Path, names: Sequence[str] = ()) -> list[str]:
    """Return the names of a built site's pages: their paths without suffix.

    Args:
        names: Pages to return; all by default.

    Raises:
        FileNotFoundError: The folder holds no page, or none with one of the names.
    """
    present = [path.relative_to(site).with_suffix("").as_posix() for path in links.pages_of(site)]
    for name in names:
        if name not in present:
            raise FileNotFoundError(f"{site} has no page {name!r}; it has {', '.join(present)}")
    return list(names or present)


def parts(height: int) -> list[tuple[int, int]]:
    """Return top and height of each piece of a page, in pixels.

    Args:
        height: Height of the page, in pixels.
    """
    tops = range(0, max(height - OVERLAP, 1), PART_HEIGHT - OVERLAP)
    return [(top, min(PART_HEIGHT, height - top)) for top in tops]


def problems(measured: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield the problems of a page: too wide for its window, or pictures that did not load.

    Args:
        measured: result of the script `MEASURES`.
        width: Width of the window, in pixels.
    """
    if measured["width"] > width:
        cause = f", by {measured['widest']}" if measured["widest"] else ""
        yield f"is {measured['width']} pixels wide{cause}"
    for source in measured["missing"]:
        yield f"does not load {source}"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Server of a folder's files that logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Context manager that serves a folder on this machine, and yields its address."""
    # A browser waits long on addresses of files.
    handler = partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer((LOCAL, 0), handler) as server:
        # By default the server looks for its end only twice a second.
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://{LOCAL}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _pictured(
    page: browser.Page, url: str, width: int, stem: Path, *, dark: bool
) -> dict[str, Any]:
    """Load a page, write its pictures, and return the result of `MEASURES`.

    Args:
        width: Width of the window, in pixels.
        stem: Path of the pictures without `-PIECE.png`.
    """
    page.shape(width, WINDOW_HEIGHT, dark=dark)
    page.go(url)
    page.until(LOADED)
    measured = page.value(MEASURES)
    for number, (top, height) in enumerate(parts(measured["height"])):
        page.shape(width, height, dark=dark)
        # The page is scrolled as a reader does, because parts outside of the window look different.
        page.value(SCROLLED % top)
        page.picture(stem.with_name(f"{stem.name}-{number}.png"))
    return measured


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    site: Positional[Path]
    """Folder of the built site."""
    out: Positional[Path]
    """Folder of the pictures: OUT/SCHEME/WIDTH/PAGE-PIECE.png."""
    widths: tuple[int, ...] = (1280, 390)
    """Widths of the window, in pixels."""
    schemes: tuple[str, ...] = ("light",)
    """Colour schemes: light, dark or both."""
    pages: tuple[str, ...] = ()
    """Paths in the site without suffix; all by default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pictures and print problems.

    Returns:
        0, 1 if a page has a problem, or 2 without a site or browser.
    """
    args = harness.parse(Options, argv)
    harness.check_names(args.schemes, SCHEMES)
    num_problems = 0
    num_pages = 0
    try:
        chosen = pages(args.site, args.pages)
        with served(args.site) as host, browser.page() as page:
            for scheme, width in itertools.product(args.schemes, args.widths):
                folder = args.out / scheme / str(width)
                folder.mkdir(parents=True, exist_ok=True)
                for name in chosen:
                    url = f"{host}/{name}.html"
                    stem = folder / name.replace("/", ".")
                    measured = _pictured(page, url, width, stem, dark=scheme == "dark")
                    for problem in problems(measured, width):
                        print(f"{name} at {width} pixels, {scheme}: {problem}")
                        num_problems += 1
                    num_pages += 1
    except (FileNotFoundError, browser.BrowserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{num_pages} pictures of pages in {args.out}, {num_problems} problems")
    return int(bool(num_problems))


if __name__ == "__main__":
    raise SystemExit(main())
