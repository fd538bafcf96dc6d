"""What a compiler for TPU pods makes of a step, ahead of time: memory, collectives, cycles."""
