"""Writes build/report.pdf, or what `--out` names: every number of it is computed from the committed records.

    python -m scripts.report [--out build/report.pdf]

Typst sets it (`pip install typst`, or the extra `site`); `make report` installs and runs it.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts import harness
from scripts.report import facts

TEMPLATE = Path(__file__).with_name("report.typ")
PICTURES = {"head_dim.png": "transfer/head_dim/head_dim.png"}
"""Name in the template to file of docs/."""


def compiled(out: Path) -> None:
    """Writes the report.

    Args:
        out: the PDF.
    """
    import typst  # pyright: ignore[reportMissingImports]  (of the extra `site`)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "facts.json").write_text(json.dumps(facts.gathered()))
        shutil.copy(TEMPLATE, root)
        for name, path in PICTURES.items():
            shutil.copy(facts.DOCS / path, root / name)
        out.parent.mkdir(parents=True, exist_ok=True)
        typst.compile(str(root / TEMPLATE.name), output=str(out), root=str(root))


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    out: Path = Path("build/report.pdf")
    """The PDF."""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report; 2 where Typst is not installed."""
    args = harness.parse(Options, argv)
    if importlib.util.find_spec("typst") is None:
        print(
            "error: Typst is not installed; write `make report`, or `pip install typst`",
            file=sys.stderr,
        )
        return 2
    compiled(args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
