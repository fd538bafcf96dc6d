"""Low-rank adapters of a block's matrices: a model's config of them, and what they compute."""
