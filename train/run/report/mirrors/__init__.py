"""TensorBoard and trackers that get a run's metrics besides metrics.jsonl."""
