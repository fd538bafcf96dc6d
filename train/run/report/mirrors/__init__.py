"""Where a run's metrics go besides metrics.jsonl."""
