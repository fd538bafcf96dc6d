"""Faults at the edges of a run: odd paths, other environments, signals, clients and files of strangers."""
