"""Text that is tokenized while it is trained on (streams), as lanes of documents and as batches."""
