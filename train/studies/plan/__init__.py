"""A run planned before it is run: its whole config, what it costs, what to expect; and forecasts held against what came."""
