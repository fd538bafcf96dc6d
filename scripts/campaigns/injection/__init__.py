"""Faults that campaigns inject: disks, buckets, clocks and links that fail, and broken files."""
