"""Figures of the effective theory's strategies (Dinan, Yaida and Zhang 2023)."""
