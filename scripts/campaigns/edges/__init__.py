"""Trials of commands in unusual conditions: paths, environments, signals, clients, bad files."""
