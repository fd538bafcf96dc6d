"""Commands that train many small models to answer one question."""
