"""Forecast of a run's loss and best learning rate, by a law fitted to a study's rows."""
