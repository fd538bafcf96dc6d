"""Devices and processes of a run: meshes, shardings, hardware, signals, and several processes."""
