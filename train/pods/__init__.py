"""Steps compiled ahead of time for TPUs and GPUs: memory, collectives and (TPUs) clock cycles."""
