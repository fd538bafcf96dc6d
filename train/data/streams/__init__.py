"""Text that is tokenized while it is trained on: lanes that grow, the documents they are made of, and their batches."""
