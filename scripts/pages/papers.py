"""Papers cited by arXiv number in code and documents: the page docs/reference/papers.md.

    python -m scripts.pages.papers

A number is cited alone, after `arXiv`, or after a name: Bordelon et al. 2024 (2405.15712). On the
site each number is a link.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT, harness
from scripts.pages import markdown

PAGE = ROOT / "docs" / "reference" / "papers.md"
NUMBER = re.compile(r"(?<![\w./-])(\d\d)(0[1-9]|1[0-2])\.\d{5}(?![\d.]*\d)")
"""arXiv number since 2015: year, month and five digits."""
_YEAR = r"(?P<year>(?:19|20)\d\d)"
BEFORE = re.compile(
    rf"(?P<words>[\w+()-][^;]*?)(?P<more> et al\.)?[ ,(]*{_YEAR}?[ ,(]*(?:arXiv )?$"
)
"""Text before a number: words that may end in a name, and sometimes the year."""
CITED = ("*.md", "*.py", "*.ipynb", "*.cff")
"""Patterns of the files that are searched for citations."""
SHOWN = ("docs/", "presets/", "zoo/", "train/", "README.md")
"""Beginnings of the paths that the page lists. Scripts and tests repeat their citations."""
HEAD = """# Papers

The table has cited papers and the citing files. `mupax presets constants mup` says whether a
constant's value was read in the source (verified), in an account of it (reported) or worked out
here (derived).

"""


class Paper(NamedTuple):
    """Paper that may be cited."""

    authors: str
    """Names of the authors, or of the first one and `et al.`; empty if they are not known."""
    title: str = ""
    """Short name of the paper or its method in prose; several are separated by semicolons."""

    @property
    def names(self) -> set[str]:
        """Names that may stand before the paper's number: authors and titles."""
        authors = re.split(r", | and ", self.authors.removesuffix(" et al."))
        names = {*authors, *self.title.split("; ")}
        # Authors or a title that are not known split into an empty text.
        names.discard("")
        return names


PAPERS: Mapping[str, Paper] = {
    "1706.02677": Paper("Goyal et al.", "linear scaling"),
    "1706.04599": Paper("Guo et al."),
    "1812.06162": Paper("McCandlish et al."),
    "1909.13719": Paper("Cubuk et al.", "RandAugment"),
    "1910.10683": Paper("Raffel et al.", "T5"),
    "1910.13461": Paper("Lewis et al.", "BART"),
    "2101.07464": Paper("Lu", "Householder dice"),
    "2106.09685": Paper("Hu et al.", "LoRA"),
    "2203.03466": Paper("Yang et al.", "Tensor Programs V"),
    "2203.15556": Paper("Hoffmann et al."),
    "2204.02311": Paper("Chowdhery et al.", "PaLM"),
    "2205.01580": Paper("Beyer et al."),
    "2205.10287": Paper("Malladi et al."),
    "2212.05055": Paper("Komatsuzaki et al."),
    "2304.01433": Paper("Jouppi et al."),
    "2304.02034": Paper("Dinan, Yaida and Zhang"),
    "2310.01889": Paper("Liu et al."),
    "2310.02244": Paper("Yang et al.", "Tensor Programs VI"),
    "2310.17813": Paper("Yang, Simon and Bernstein"),
    "2311.18718": Paper("Chizat and Netrapalli"),
    "2401.02954": Paper("DeepSeek", "DeepSeek LLM"),
    "2402.12354": Paper("Hayou et al.", "LoRA+"),
    "2404.05728": Paper("Lingle"),
    "2405.13698": Paper("Wang and Aitchison"),
    "2405.15712": Paper("Bordelon, Chaudhry and Pehlevan"),
    "2407.05872": Paper("Everett et al."),
    "2407.17465": Paper("Blake et al.", "u-muP"),
    "2409.19913": Paper("Bjorck et al."),
    "2410.10989": Paper("Hsu et al."),
    "2501.18965": Paper("Schaipp et al."),
    "2502.16982": Paper("Liu et al.", "Moonlight"),
    "2503.04715": Paper("Li et al.", "Step Law"),
    "2505.01618": Paper("Dey et al.", "CompleteP"),
    "2505.13738": Paper("Bergsma et al.", "Power Lines"),
    "2505.16932": Paper("Amsel et al.", "Polar Express"),
    "2506.15025": Paper("Hayou and Liu"),
    "2507.07101": Paper("Marek et al."),
    "2507.20534": Paper("Kimi Team", "MuonClip"),
    "2510.15262": Paper("Fan et al."),
    "2510.19093": Paper("Kosson et al."),
    "2512.05620": Paper("Qiu et al."),
    "2512.22382": Paper("Mlodozeniec et al.", "Complete(d)P"),
    "2601.20205": Paper("Jiang, Bordelon, Pehlevan and Hanin"),
    "2603.00541": Paper(""),
    "2603.28743": Paper("", "HyperP"),
    "2605.08933": Paper("Zhang et al."),
    "2605.14200": Paper("Vankadara, Haas et al."),
    "2605.15290": Paper("", "GQA-muP"),
    "2605.21486": Paper("Kalra and Barkeshli"),
}
"""arXiv number to its paper, in the order of the page."""


def address(number: str) -> str:
    """Return the web address of a paper."""
    return f"https://arxiv.org/abs/{number}"


def citing(root: Path = ROOT) -> dict[str, str]:
    """Return path to text of every tracked file that may cite.

    Left out are the page of papers, which is made of the citations, this file and its test.
    """
    command = ["git", "ls-files", "-z", "--", *CITED]
    finished = subprocess.run(command, cwd=root, capture_output=True, check=True)
    skipped = {
        "docs/reference/papers.md",
        "scripts/pages/papers.py",
        "tests/scripts/pages/test_papers.py",
    }
    texts = {}
    for name in finished.stdout.decode().split("\0"):
        # A file may be tracked and deleted.
        if name and name not in skipped and (root / name).is_file():
            texts[name] = (root / name).read_text()
    return texts


def problems(texts: Mapping[str, str], papers: Mapping[str, Paper] = PAPERS) -> list[str]:
    """Return one line for each citation that must be wrong, and for each paper without a citation.

    Args:
        texts: path to text, as `citing` returns them.
    """
    lines: list[str] = []
    cited: set[str] = set()
    for path, text in texts.items():
        lines += _wrong(path, text, papers)
        cited |= {match[0] for match in NUMBER.finditer(text)}
    for number in papers:
        if number not in cited:
            lines.append(f"{number} is cited nowhere; take it out of PAPERS")
    return lines


def _wrong(path: str, text: str, papers: Mapping[str, Paper]) -> Iterator[str]:
    """Yield the wrong citations of one file."""
    names: set[str] = set()
    for paper in papers.values():
        names |= paper.names
    longest_first = sorted(names, key=len, reverse=True)

    end = 0
    for match in NUMBER.finditer(text):
        number = match[0]
        # Text before the last number belongs to that one.
        start = max(end, match.start() - 80)
        before = BEFORE.search(re.sub(r"[\s#\"]+", " ", text[start : match.start()]))
        end = match.end()
        if number not in papers:
            yield (
                f"{path}: {number} is no paper of scripts/pages/papers.py; write it there, "
                "or mend the number"
            )
            continue
        if before is None:
            continue
        if before["year"] not in (None, f"20{match[1]}"):
            yield f"{path}: {before['year']} beside {number}, which is of 20{match[1]}"

        paper = papers[number]
        name = _name_at_end(before, longest_first)
        if name is not None and name not in paper.names:
            authors = paper.authors or paper.title or "authors not known here"
            yield f"{path}: {name} beside {number}, which is by {authors}"


def _name_at_end(before: re.Match[str], names: Sequence[str]) -> str | None:
    """Return the name at the end of the text before a number, or `None` if the text names no paper.

    A word before `et al.` or a year counts as a name, too.

    Args:
        before: match of `BEFORE`.
        names: Names to look for, the longest first, because one may end in another.
    """
    for name in names:
        if re.search(rf"(?<!\w){re.escape(name)}$", before["words"]):
            return name
    if before["more"] or before["year"]:
        return before["words"].split()[-1]
    return None


def page(texts: Mapping[str, str]) -> str:
    """Return the page: a table of the papers with the files that cite them.

    Args:
        texts: path to text, as `citing` returns them.
    """
    rows = [["paper", "arXiv", "cited in"]]
    for number, paper in PAPERS.items():
        places = []
        for path in sorted(texts):
            if path.startswith(SHOWN) and number in texts[path]:
                places.append(_place(path))
        authors = f"{paper.authors} 20{number[:2]}" if paper.authors else ""
        about = ": ".join(text for text in (authors, paper.title) if text)
        rows.append([about, f"[{number}]({address(number)})", ", ".join(places)])
    return f"{HEAD}{markdown.table(rows)}\n"


def _place(path: str) -> str:
    """Return a link to a document, or the path of code."""
    if not (path.startswith("docs/") and path.endswith(".md")):
        return f"`{path}`"
    target = os.path.relpath(ROOT / path, PAGE.parent)
    return f"[{Path(path).name}]({target})"


def main() -> int:
    """Write the page, print wrong citations, and return 1 if there are any."""
    texts = citing()
    PAGE.write_text(page(texts))
    wrong = problems(texts)
    print("\n".join([*wrong, f"wrote {PAGE.relative_to(ROOT)}"]))
    return int(bool(wrong))


if __name__ == "__main__":
    harness.refuse_words()
    raise SystemExit(main())
