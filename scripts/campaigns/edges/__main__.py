"""Start commands while something around them is unusual, and judge how they end.

    python -m scripts.campaigns.edges [CAMPAIGN ...] [--count N] [--seed N] [--only WORD]
        [--again] [--docs DIR]

Each campaign is a module of this folder with a function `trials(shared, seed)`, which returns named
trials. A trial starts a command as a user would, and something unusual happens. The command may end
well or refuse with one line. It must not lose work, go wrong without a line, hang for over 60 s,
print a traceback or crash. A result is written after every trial, to docs/evidence/edges, and a
trial that has one is not run again. The page is docs/evidence/reliability.md.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from mupax.command_line import Switch
from scripts import ROOT, harness
from scripts.campaigns import PAGE
from scripts.campaigns.edges.trial import FAULTS, Outcome, Trial
from scripts.pages.markdown import table, write_section

COMMAND = "python -m scripts.campaigns.edges"
CAMPAIGNS = {
    "paths": "Commands given a folder or file with an odd name",
    "environments": "Runs resumed, or joined by a process, under other flags, devices or versions",
    "folders": "Commands that make a folder, killed at an operation or on a full disk",
    "signals": "Signals to commands at chosen moments",
    "server": "Requests to `mupax serve`, and load",
    "files": "Untrusted files, read with a memory limit",
    "processes": "Two processes of a run, one cut off, stopped or slow",
}
"""Every campaign with its description on the page."""


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    campaigns: Positional[tuple[str, ...]] = ()
    count: int | None = None
    """Number of trials of each campaign, at equal distances. Default: all."""
    seed: int = 0
    """Seed of the random choices of the trials."""
    only: str = ""
    """Run only trials whose name or group has this word."""
    again: Switch = False
    """Run trials that have a result again."""
    docs: Path = ROOT / "docs" / "evidence"
    """Folder of the page, and of the results in `edges`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials without a result and write the page. Return 0 if no trial shows a fault."""
    args = harness.parse(Options, argv)
    harness.check_names(args.campaigns, CAMPAIGNS, "campaign")
    names = args.campaigns or list(CAMPAIGNS)
    for name in names:
        run_campaign(name, args)
    results = read_results(args.docs)
    write_section(args.docs / PAGE.name, "edges", page(results))
    for name in names:
        if any(row["verdict"] in FAULTS for row in results.get(name, {}).values()):
            return 1
    return 0


def run_campaign(name: str, args: Options) -> None:
    """Run the chosen trials of one campaign, and write the results after each."""
    file = args.docs / "edges" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(file.read_text()) if file.exists() else {}
    module = importlib.import_module(f"scripts.campaigns.edges.{name}")
    shared = Path(tempfile.mkdtemp(prefix=f"edges-{name}-"))
    try:
        for trial in chosen(module.trials(shared, args.seed), args.only, args.count):
            if trial.name in results and not args.again:
                continue
            results[trial.name] = result_of(trial)
            if results[trial.name]["verdict"] in FAULTS:
                print(f"{name}: {trial.name}: {results[trial.name]}", file=sys.stderr, flush=True)
            write_results(file, results)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def chosen(trials: Sequence[Trial], word: str, count: int | None) -> list[Trial]:
    """Return the trials with `word` in their name or group.

    If there are more than `count`, return `count` of them at equal distances.
    """
    named = []
    for trial in trials:
        if word in trial.name or word in trial.group:
            named.append(trial)
    if count is None or count >= len(named):
        return named
    return [named[index * len(named) // count] for index in range(count)]


def result_of(trial: Trial) -> dict[str, Any]:
    """Run one trial in a new folder, and return its group, verdict, seconds and detail.

    An exception of the trial itself gives the verdict `wrong`.
    """
    folder = Path(tempfile.mkdtemp(prefix="edge-"))
    began = time.monotonic()
    try:
        outcome = trial.run(folder)
    except Exception:
        # An error of the campaign itself must not pass for a good trial.
        trace = traceback.format_exc(limit=3)[-400:]
        outcome = Outcome("wrong", f"the trial itself failed: {trace}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.monotonic() - began, 1)
    return {
        "group": trial.group,
        "verdict": outcome.verdict,
        "seconds": seconds,
        "detail": outcome.detail[:240],
    }


def write_results(file: Path, results: Mapping[str, Any]) -> None:
    """Replace the file of results, which has one trial a line."""
    lines = []
    for name, row in sorted(results.items()):
        lines.append(f"{json.dumps(name)}: {json.dumps(row)}")
    # A campaign that is killed while it writes must keep its results.
    temporary = file.with_suffix(".new")
    temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    temporary.replace(file)


def read_results(docs: Path) -> dict[str, dict[str, Any]]:
    """Return the results of every campaign that has a file of results."""
    results = {}
    for name in CAMPAIGNS:
        file = docs / "edges" / f"{name}.json"
        if file.exists():
            results[name] = json.loads(file.read_text())
    return results


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the Markdown section for reliability.md: a table with a row for each campaign.

    Args:
        results: Campaign to its trials: name to result (see `result_of`).
    """
    cells = [["campaign", "trials", "tried", "ok", "faults"]]
    for name, rows in results.items():
        num_ok = 0
        num_faults = 0
        for row in rows.values():
            num_ok += row["verdict"] == "ok"
            num_faults += row["verdict"] in FAULTS
        link = f"[{name}](edges/{name}.json)"
        cells.append([link, CAMPAIGNS[name], str(len(rows)), str(num_ok), str(num_faults)])
    text = (
        "Each trial runs a command while something around it is unusual, such "
        "as a full disk. A trial is **ok** if the command gives the right result, or one line that "
        "says what is wrong. Otherwise it is a fault: lost work, a wrong result, a missing "
        f"message, a hang, a traceback or a crash. `{COMMAND}`"
    )
    return "\n".join(["## Faults at the edges", "", text, "", table(cells), ""])


if __name__ == "__main__":
    sys.exit(main())
