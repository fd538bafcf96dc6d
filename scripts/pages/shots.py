"""Pictures of every page of the built site in a real browser, and what it measures there: pages too wide, pictures not loaded.

    python -m scripts.pages.shots build/site build/shots --widths 1280 390 --schemes light dark --pages index transfer

A page is one PNG per 4,000 pixels of its height. `scripts.pages.links` reads the files of the site; this one sees what a reader does.
"""

from __future__ import annotations

import http.server
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
WINDOW_HEIGHT, PART_HEIGHT, OVERLAP = 900, 4000, 60
"""Pixels: of the window, of a page's piece in one file, and of what the bar on top hides of a piece."""
SCHEMES = ("light", "dark")
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
    const inside = node => { while ((node = node.parentElement) && node != document.body) if (scrolls(node)) return true; };
    const past = [...document.body.querySelectorAll('*')].filter(node =>
      node.getBoundingClientRect().right > width + 1 && getComputedStyle(node).position != 'fixed' && !inside(node));
    return {
      width: root.scrollWidth, height: root.scrollHeight,
      widest: past.length ? past.at(-1).outerHTML.slice(0, 80) : '',
      missing: [...document.images].filter(image => !image.naturalWidth).map(image => image.getAttribute('src')),
    };
  });
})()"""
"""Sizes of a page in pixels, what reaches out of the window, and pictures that did not load."""


def pages(site: Path, names: Sequence[str] = ()) -> list[str]:
    """Names of a built site's pages: their paths without suffix.

    Args:
        site: folder of the site.
        names: of the pages; all without.

    Raises:
        FileNotFoundError: there is no site, or no page of a name.
    """
    every = [path.relative_to(site).with_suffix("").as_posix() for path in links.pages_of(site)]
    if unknown := [name for name in names if name not in every]:
        raise FileNotFoundError(f"{site} has no page {unknown[0]!r}; it has {', '.join(every)}")
    return list(names or every)


def parts(height: int) -> list[tuple[int, int]]:
    """Top and height in pixels of the pieces in which a page of `height` is pictured."""
    tops = range(0, max(height - OVERLAP, 1), PART_HEIGHT - OVERLAP)
    return [(top, min(PART_HEIGHT, height - top)) for top in tops]


def problems(measured: Mapping[str, Any], width: int) -> Iterator[str]:
    """What is wrong with a page in a window of `width` pixels."""
    if measured["width"] > width:
        by = f", by {measured['widest']}" if measured["widest"] else ""
        yield f"is {measured['width']} pixels wide{by}"
    for source in measured["missing"]:
        yield f"does not load {source}"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, without a line for each."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of a folder that this machine serves itself: a site is read from a host, and a browser waits long on files."""
    with http.server.ThreadingHTTPServer(
        (LOCAL, 0), partial(_Quiet, directory=str(site))
    ) as server:
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
    """The measures of a page, of which it writes pictures."""
    page.shape(width, WINDOW_HEIGHT, dark=dark)
    page.go(url)
    page.until(LOADED)
    measured = page.value(MEASURES)
    for number, (top, height) in enumerate(parts(measured["height"])):
        page.shape(
            width, height, dark=dark
        )  # and scrolled as a reader does: what is out of the window is drawn otherwise
        page.value(SCROLLED % top)
        page.picture(stem.with_name(f"{stem.name}-{number}.png"))
    return measured


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    site: Positional[Path]
    """The folder of the built site."""
    out: Positional[Path]
    """The folder of the pictures: OUT/SCHEME/WIDTH/PAGE-PIECE.png."""
    widths: tuple[int, ...] = (1280, 390)
    """Widths of the window, in pixels."""
    schemes: tuple[str, ...] = ("light",)
    """Colours."""
    pages: tuple[str, ...] = ()
    """Paths in the site without suffix; all by default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the pictures and prints what is wrong; 1 where anything is, 2 where there is no site or browser."""
    args = harness.parse(Options, argv)
    harness.check_names(args.schemes, SCHEMES)
    wrong = count = 0
    try:
        chosen = pages(args.site, args.pages)
        with served(args.site) as host, browser.page() as page:
            for scheme in args.schemes:
                for width in args.widths:
                    folder = args.out / scheme / str(width)
                    folder.mkdir(parents=True, exist_ok=True)
                    for name in chosen:
                        stem = folder / name.replace("/", ".")
                        measured = _pictured(
                            page, f"{host}/{name}.html", width, stem, dark=scheme == "dark"
                        )
                        for problem in problems(measured, width):
                            print(f"{name} at {width} pixels, {scheme}: {problem}")
                            wrong += 1
                        count += 1
    except (FileNotFoundError, browser.BrowserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{count} pictures of pages in {args.out}, {wrong} problems")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
