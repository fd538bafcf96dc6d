"""Small image folders that `scripts/bench/recipes/small_folders.py` trains on."""
