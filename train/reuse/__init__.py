"""Other runs' parameters: read, converted between forms, and carried into a model."""
