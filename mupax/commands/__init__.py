"""The commands of `mupax`: their table, and those that no package below has."""
