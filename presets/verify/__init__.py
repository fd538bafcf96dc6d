"""Is a parameterization right that somebody else's code has? `mupax verify` reads what it gives each parameter at two sizes.

`dump` and `formats` read it, `names` and `axes` say what each parameter is, `fit` what grows and how fast, `reference` which preset
it is closest to, `findings` what becomes of what differs, in a sentence each.
"""
