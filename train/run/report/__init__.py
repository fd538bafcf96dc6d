"""Output of a run: metrics, progress, timing, pictures and the summary."""
