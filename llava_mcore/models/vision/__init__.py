"""Vision towers: transformers for tiles and for packed patches, and in `families` what is special about each tower."""
