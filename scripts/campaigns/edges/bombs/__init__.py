"""Hostile, damaged and large files for the campaign `files`, one module for each kind of reader."""
