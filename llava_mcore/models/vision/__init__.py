"""Vision towers: one file per family, based on a common transformer."""
