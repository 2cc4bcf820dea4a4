"""Vision towers: one file a family, on top of the transformer they share."""
