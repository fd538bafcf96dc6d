"""What the coordinate check catches: wrong rules, one at a time and joint, on every structure; what it allows right ones."""

from scripts import ROOT

PAGE = ROOT / "docs" / "evidence" / "checks.md"
"""Page of the coordinate check. Each command here writes the section between its markers."""
