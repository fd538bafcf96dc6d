"""The table of `mupax` commands, dispatch, and the commands `presets`, `models` and `data`.

Other commands are defined in the packages that do their work, such as `mupax.train.run`.
"""
