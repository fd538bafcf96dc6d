"""Plans without a study: by a law of runs in a table, `--from TABLE.csv`, or by mupax's evidence."""
