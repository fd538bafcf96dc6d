"""Parts that model families share: linear maps, norms, attention, caches, the residual block."""
