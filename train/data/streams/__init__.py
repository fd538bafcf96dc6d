"""Text that is tokenized while it is trained on (streams), as lanes of documents and as batches.

A lane is a share of a corpus's files, with a file of token ids that grows while it is read.
"""
