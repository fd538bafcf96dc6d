"""Memory that a step needs on a device, from sizes and from compiled programs."""
