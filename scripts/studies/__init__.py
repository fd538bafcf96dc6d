"""Trained studies, each resumable: the rate's transfer, tuned presets, forecasts, desiderata, experts, growth, fine-tuning, other code."""
