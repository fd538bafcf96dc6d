"""Commands that train many small models to answer one question, and the report that they share."""
