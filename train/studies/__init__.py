"""Studies, most of which train many small models, and their common report."""
