"""Attention where devices split positions: keys go round, and each device folds in what passes."""
