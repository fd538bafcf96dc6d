"""Plan of a run: its config, cost and expected loss; scores of forecasts against finished runs."""
