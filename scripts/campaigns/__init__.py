"""Campaigns that disturb runs on purpose. Each is a command that goes on where it was stopped."""

from scripts import ROOT

PAGE = ROOT / "docs" / "evidence" / "reliability.md"
"""Page with one section for each campaign. The record of a campaign lies in the same folder."""
