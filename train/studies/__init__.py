"""Studies, most of which train many small models, and the report that they share."""
