"""Low-rank adapters of a block's matrices: what they compute."""
