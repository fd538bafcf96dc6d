"""Commands that measure, draw and prove what docs/ claims: `python -m scripts.FOLDER.NAME`.

| folder | results of its commands |
|---|---|
| `bench` | docs/evidence/performance.md and others: time and memory, beside PyTorch |
| `campaigns` | outcomes of killed runs, damaged files, failing disks and wrong input |
| `check` | faults that the coordinate check catches, and the deviation of right rules |
| `figures` | the papers' figures, measured again |
| `house` | records of behaviour, sizes and style of the code, compared between commits |
| `launch` | none: files that start a run on many hosts |
| `pages` | pages of docs/ made from committed files, and the Markdown helpers of all pages |
| `quality` | docs/evidence/quality.md, with its trainings |
| `vision` | small folders of images to train on |
| `parity` | the table of docs/howto/huggingface.md: logits beside `transformers` |
| `report` | build/report.pdf |
| `studies` | trained studies: transfer, the reliability of its verdicts, forecasts |

`harness` has the shared parts: options by tyro, and records with one line for each row. `goldens`
writes the golden tables of the tests. `release` names what is missing before a release. A finished
measurement keeps its data in docs/, with its command and the commit that has the command.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""Root of the checkout, with docs/ and tests/."""
