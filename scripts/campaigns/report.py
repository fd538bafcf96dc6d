"""Page of all campaigns, docs/evidence/reliability.md: each campaign writes the section between its markers."""

from __future__ import annotations

from pathlib import Path

from scripts import ROOT
from scripts.pages.markdown import replaced

PAGE = ROOT / "docs" / "evidence" / "reliability.md"


def write_section(page: Path, name: str, section: str) -> None:
    """Write the section of the campaign `name` into a page; a page without its markers is written anew."""
    text = page.read_text() if page.exists() else ""
    if f"<!-- {name}: begin -->" in text:
        section = replaced(text, name, f"\n{section}")
    page.write_text(section)
