"""Campaigns of `scripts.campaigns` as a user starts them, with quickly compiled programs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fixtures.xla import QUICKLY

ROOT = Path(__file__).resolve().parents[3]


def campaigns(folder: Path, words: Mapping[str, str], before: str = "") -> dict[str, Any]:
    """Run campaigns in one process, which imports JAX once, and return their records by name.

    Args:
        words: Name of each campaign, which must return 0, to its flags.
        before: Python code that the process runs before.
    """
    pages = {name: folder / f"{name}.md" for name in words}
    lines = [before]
    for name, flags in words.items():
        argv = [*shlex.split(flags), "--page", str(pages[name])]
        lines += [f"from scripts.campaigns import {name}", f"assert {name}.main({argv}) == 0"]
    command = [sys.executable, "-c", "\n".join(lines)]
    environ = os.environ | {"XLA_FLAGS": " ".join(QUICKLY), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=500 * len(words),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: json.loads(page.with_suffix(".json").read_text()) for name, page in pages.items()}
