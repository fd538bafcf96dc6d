"""Models written in any framework, given as functions of a pytree of arrays."""
