"""Mixture of experts: the router, exchanges of tokens between devices, and products by expert."""
