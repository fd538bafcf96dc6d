"""Table of `mupax` commands, dispatch, and the commands `presets`, `models` and `data`."""
