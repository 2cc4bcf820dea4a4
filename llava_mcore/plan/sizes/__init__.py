"""The sizes of a model, its towers and its samples, from config.json alone."""
