"""Devices and processes: meshes, shardings, hardware, signals, and the way of batches to devices."""
