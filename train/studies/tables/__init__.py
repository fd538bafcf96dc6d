"""Plans without a study, from a table of runs (`--from TABLE.csv`) or from mupax's evidence."""
