"""Tokenizers, packing of documents, batches of tokens, span corruption and n-gram references."""
