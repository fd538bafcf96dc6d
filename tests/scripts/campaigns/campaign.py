"""Campaigns of `scripts.campaigns` as a user starts them, with programs compiled as quickly as those of the tests."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.fixtures.xla import QUICKLY

ROOT = Path(__file__).resolve().parents[3]


def campaign(module: ModuleType, words: str, folder: Path) -> Any:
    """Run a campaign, which must end with 0, and return the record that it writes beside its page."""
    page = folder / "page.md"
    command = [sys.executable, "-m", module.__name__, *shlex.split(words), "--page", str(page)]
    environ = os.environ | {"XLA_FLAGS": " ".join(QUICKLY)}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    name = module.__name__.rpartition(".")[2]
    return json.loads(page.with_name(f"{name}.json").read_text())
