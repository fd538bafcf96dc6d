"""Small image folders, which the study of recipes for them trains on."""
