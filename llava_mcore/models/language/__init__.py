"""Language models: one file per family, based on a common dense decoder."""
