"""Trials at the edges of a run: odd paths, environments, signals, clients, files of strangers."""
