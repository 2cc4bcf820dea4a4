"""Language models: one file a family, on top of the dense decoder they share."""
