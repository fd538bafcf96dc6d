"""Check of other code's parameterization, from the values it gives each parameter at two sizes.

`formats` reads files with these values ("dumps"), `names` and `axes` find out what each parameter
is, `fit` computes how fast each value grows, `reference` chooses the closest preset, `findings`
says what follows from each difference, and `command` is `mupax verify`.
"""
