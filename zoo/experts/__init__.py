"""Layers of experts, of which a token goes to a few: the config, the router, the products, the layer."""
