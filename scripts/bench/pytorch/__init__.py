"""The same models, steps and runs in PyTorch."""
