"""A law of runs that stand in a table, whoever trained them: `mupax plan --from TABLE.csv`."""
