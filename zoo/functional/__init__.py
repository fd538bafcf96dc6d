"""Models that are no NNX module of declared parameters: a function of a pytree of arrays, of any framework."""
