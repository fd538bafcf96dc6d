"""A preset for a model of any framework: initial values, multipliers of the forward pass and an optax transformation."""
