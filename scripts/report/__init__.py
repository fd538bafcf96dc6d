"""Report on presets, transfer and wrong rules, made from the committed records."""
