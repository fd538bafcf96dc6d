"""One file a source: the paper's table in its docstring and one pure function under it."""
