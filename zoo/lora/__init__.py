"""Low-rank adapters (LoRA) of a block's matrices."""
