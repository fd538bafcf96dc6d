"""Steps compiled for TPU pods ahead of time: memory, collectives and clock cycles."""
