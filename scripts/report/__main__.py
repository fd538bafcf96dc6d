"""Write a report as build/report.pdf, with every number computed from the committed records.

    python -m scripts.report [--out build/report.pdf]

The command needs Typst (`pip install typst`, or the extra `site`). `make report` installs Typst and
runs the command.
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
"""Text of the report, which reads its numbers from facts.json."""
PICTURES = {"head_dim.png": "transfer/head_dim/head_dim.png"}
"""Name of a picture in the template to its path below docs/evidence."""


def write_report(out: Path) -> None:
    """Set the report with Typst and write it as a PDF to `out`."""
    import typst  # pyright: ignore[reportMissingImports]  (comes with the extra `site`)

    # Typst reads files below its root only, so everything is copied to one folder.
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
    """File to write the PDF to."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 2 if Typst is not installed."""
    args = harness.parse(Options, argv)
    if importlib.util.find_spec("typst") is None:
        print(
            "error: Typst is not installed; write `make report`, or `pip install typst`",
            file=sys.stderr,
        )
        return 2
    write_report(args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
