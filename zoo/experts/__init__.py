"""Layers of experts, a few of which read each token: the router, the exchanges, the products."""
