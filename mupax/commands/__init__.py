"""The table of all commands of `mupax`, their dispatch, and the commands `presets`, `models`, `data`.

Other commands are defined in the packages that do their work, such as `mupax.train.run`.
"""
