"""Files that the campaign `files` makes, by what reads them."""
