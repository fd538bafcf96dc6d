"""Figures of models at initialization, and after one step."""
