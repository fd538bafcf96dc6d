"""Trained studies, each resumable: the learning rate's transfer, tuned presets, forecasts, desiderata, experts, growth, other code."""
