"""Trained studies that resume after an interruption: transfer, forecasts and published runs."""
