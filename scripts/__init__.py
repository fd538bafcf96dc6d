"""Commands that measure, draw and prove what docs/ says: `python -m scripts.ROOM.NAME`, each thin over `mupax`.

| room | what its commands write |
|---|---|
| `bench` | docs/evidence/performance.md and others: time and memory, beside PyTorch where it has the same |
| `campaigns` | what became of killed runs, damaged files, sick disks and wrong input |
| `check` | what the coordinate check catches, and how far right rules stray |
| `figures` | the papers' figures, measured again |
| `launch` | nothing: files that start a run on many hosts |
| `pages` | pages of docs/ from what is committed, and the Markdown that all pages are made of |
| `quality` | docs/evidence/quality.md, with its trainings |
| `vision` | small folders of images to train on |
| `parity` | the table of docs/howto/huggingface.md: logits beside `transformers` |
| `report` | build/report.pdf |
| `studies` | trained studies: transfer, how far its verdicts can be trusted, forecasts |

`harness` has what all commands share: options by tyro, and records with a row a line.
`goldens` writes the golden tables of the tests, `release` says what is missing before a release. A finished measurement keeps its data
in docs/, with its command and the commit that has the command.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, where docs/ and tests/ are."""
