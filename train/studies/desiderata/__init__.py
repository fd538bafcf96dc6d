"""Which dimensions of a transformer can be scaled: a block cut into its mappings, measured beside theory."""
