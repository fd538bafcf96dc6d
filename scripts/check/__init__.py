"""Studies of the coordinate check: right rules that must pass, and wrong ones that must not."""

from scripts import ROOT

PAGE = ROOT / "docs" / "evidence" / "checks.md"
"""Page of the coordinate check. Each command of this package writes its own section of the page."""
