"""Campaigns that disturb runs on purpose. Each is a resumable command, `python -m scripts.campaigns.NAME`."""

from scripts import ROOT

PAGE = ROOT / "docs" / "evidence" / "reliability.md"
"""Page of all campaigns. Each writes the section between its markers, and its record beside the page."""
