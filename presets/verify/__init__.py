"""Check of other code's parameterization, from what it gives each parameter at two sizes.

`formats` reads files, `names` and `axes` find out what each parameter is, `fit` computes how fast
each value grows, `reference` chooses the closest preset, `findings` says what follows from each
difference, and `command` is `mupax verify`.
"""
