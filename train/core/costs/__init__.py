"""What a step takes of a device, from sizes alone."""
