"""Layers of experts, of which a token goes to a few: the router, the products, the layer."""
