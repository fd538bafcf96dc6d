"""A record of what mupax does, which a change of structure has to leave as it is."""
