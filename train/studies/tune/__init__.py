"""Search over many constants of a run at its base size, with a record, a picture and a preset."""
