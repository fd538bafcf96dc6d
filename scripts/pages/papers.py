"""Papers that the code and its documents cite by arXiv number: writes docs/reference/papers.md and finds wrong numbers.

    python -m scripts.pages.papers

A number is cited alone, with `arXiv` before it, or behind a name: Bordelon et al. 2024 (2405.15712). On the site each is a link.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT
from scripts.pages import markdown

PAGE = ROOT / "docs" / "reference" / "papers.md"
NUMBER = re.compile(r"(?<![\w./-])(\d\d)(0[1-9]|1[0-2])\.\d{5}(?![\d.]*\d)")
"""An arXiv number since 2015: year, month and five digits."""
_YEAR = r"(?P<year>(?:19|20)\d\d)"
BEFORE = re.compile(
    rf"(?P<words>[\w+()-][^;]*?)(?P<more> et al\.)?[ ,(]*{_YEAR}?[ ,(]*(?:arXiv )?$"
)
"""What stands before a number: words that may end in a name, and sometimes the year."""
CITED = ("*.md", "*.py", "*.ipynb", "*.cff")
SHOWN = ("docs/", "presets/", "zoo/", "train/", "README.md")
"""Where files lie that the page names; scripts and tests say again what these say."""
HEAD = """# Papers

Whose rules, formulas and settings these are, and where each is used. Whether a rule was read in its source or is reported by somebody
else stands beside it (`mupax presets constants mup`). Made by `python -m scripts.pages.papers`.

"""


class Paper(NamedTuple):
    """A paper."""

    authors: str
    """Their names, or the first one's and `et al.`; empty where only the number is known here."""
    title: str = ""
    """What the paper or its method is called in prose; several separated by semicolons."""

    @property
    def names(self) -> set[str]:
        """What may stand before its number: an author or a title."""
        authors = re.split(r", | and ", self.authors.removesuffix(" et al."))
        return {name for name in (*authors, *self.title.split("; ")) if name}


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
    "2506.15025": Paper("Hayou and Liu"),
    "2507.07101": Paper("Marek et al."),
    "2510.15262": Paper("Fan et al."),
    "2510.19093": Paper("Kosson et al."),
    "2512.05620": Paper("Qiu et al."),
    "2512.22382": Paper("Mlodozeniec et al.", "Complete(d)P"),
    "2601.20205": Paper("Jiang, Bordelon, Pehlevan and Hanin"),
    "2603.00541": Paper(""),
    "2605.14200": Paper("Vankadara, Haas et al."),
    "2605.15290": Paper("", "GQA-muP"),
    "2605.21486": Paper("Kalra and Barkeshli"),
}
"""arXiv number to the paper."""


def address(number: str) -> str:
    """Where a paper is read."""
    return f"https://arxiv.org/abs/{number}"


def citing(root: Path = ROOT) -> dict[str, str]:
    """Path in the repository to text, of every file that may cite: not the page, which is made of them, this file and its test."""
    command = ["git", "ls-files", "-z", "--", *CITED]
    listed = (
        subprocess.run(command, cwd=root, capture_output=True, check=True)
        .stdout.decode()
        .split("\0")
    )
    skipped = {
        "docs/reference/papers.md",
        "scripts/pages/papers.py",
        "tests/scripts/pages/test_papers.py",
    }
    paths = (name for name in listed if name and name not in skipped and (root / name).is_file())
    return {name: (root / name).read_text() for name in paths}


def problems(texts: Mapping[str, str], papers: Mapping[str, Paper] = PAPERS) -> list[str]:
    """What is wrong with the numbers that are cited, a line each, and papers that nothing cites.

    Args:
        texts: path to text.
        papers: number to paper.
    """
    lines = [line for path, text in texts.items() for line in _wrong(path, text, papers)]
    cited = {hit[0] for text in texts.values() for hit in NUMBER.finditer(text)}
    return lines + [
        f"{number} is cited nowhere; take it out of PAPERS"
        for number in papers
        if number not in cited
    ]


def _wrong(path: str, text: str, papers: Mapping[str, Paper]) -> Iterator[str]:
    names = sorted(
        {name for paper in papers.values() for name in paper.names}, key=len, reverse=True
    )
    end = 0
    for hit in NUMBER.finditer(text):
        number, paper = hit[0], papers.get(hit[0])
        before = BEFORE.search(
            re.sub(r"[\s#\"]+", " ", text[max(end, hit.start() - 80) : hit.start()])
        )
        end = hit.end()
        if paper is None:
            yield f"{path}: {number} is no paper of scripts/pages/papers.py; write it there, or mend the number"
        elif before is not None:
            if before["year"] not in (None, f"20{hit[1]}"):
                yield f"{path}: {before['year']} beside {number}, which is of 20{hit[1]}"
            last = before["words"].split()[-1] if before["more"] or before["year"] else None
            ending = (
                name for name in names if re.search(rf"(?<!\w){re.escape(name)}$", before["words"])
            )
            name = next(ending, last)
            if name is not None and name not in paper.names:
                by = paper.authors or paper.title or "authors not known here"
                yield f"{path}: {name} beside {number}, which is by {by}"


def page(texts: Mapping[str, str]) -> str:
    """The page's text.

    Args:
        texts: path in the repository to text, of what may cite.
    """
    rows = [["paper", "arXiv", "used in"]]
    for number, paper in PAPERS.items():
        paths = [path for path, text in texts.items() if path.startswith(SHOWN) and number in text]
        title = f"{paper.authors} 20{number[:2]}" if paper.authors else ""
        about = ": ".join(text for text in (title, paper.title) if text)
        rows.append(
            [about, f"[{number}]({address(number)})", ", ".join(map(_where, sorted(paths)))]
        )
    return f"{HEAD}{markdown.table(rows)}\n"


def _where(path: str) -> str:
    if not (path.startswith("docs/") and path.endswith(".md")):
        return f"`{path}`"
    target = os.path.relpath(ROOT / path, PAGE.parent)
    return f"[{Path(path).name}]({target})"


def main() -> int:
    """Writes the page; 1 where a number cannot be right."""
    texts = citing()
    PAGE.write_text(page(texts))
    print("\n".join([*problems(texts), f"wrote {PAGE.relative_to(ROOT)}"]))
    return int(bool(problems(texts)))


if __name__ == "__main__":
    raise SystemExit(main())
