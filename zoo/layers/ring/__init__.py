"""Ring attention, for devices that split positions."""
