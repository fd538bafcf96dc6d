"""Mixture of experts: the router, exchanges of tokens between devices, and matrix products."""
